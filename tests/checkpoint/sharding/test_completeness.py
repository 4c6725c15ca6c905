"""A checkpoint that lacks a tensor, or holds one of another shape, is refused by name before anything is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from checkpoint.sharding.source import open_source
from scheduler.errors import CheckpointError, CorruptCheckpointError, MissingShardError
from support.models import families
from support.models.store_making import shard

SINGLE = "model.safetensors"
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's tiny checkpoint, as save_pretrained writes it."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family) / "model"
            families.build(family).save_pretrained(made[family])
        return made[family]

    return make


def changed(model: Path, folder: Path, change: Callable[[Weights], object]) -> Path:
    copy = Path(shutil.copytree(model, folder / "changed"))
    weights = load_file(copy / SINGLE)
    change(weights)
    save_file(weights, copy / SINGLE, metadata={"format": "pt"})
    return copy


def refused(model: Path, folder: Path, kind: type[CheckpointError], *words: str) -> None:
    with pytest.raises(kind) as caught:
        shard(open_source(model), folder / "stores" / "store")
    assert type(caught.value) is kind
    for word in (str(model), *words):
        assert word in str(caught.value)
    assert not (folder / "stores").exists(), "nothing is written"


@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        ("mixtral", "lm_head.weight"),
        ("mixtral", "model.norm.weight"),
        ("mixtral", "model.embed_tokens.weight"),
        ("mixtral", "model.layers.2.block_sparse_moe.gate.weight"),
        ("mixtral", "model.layers.3.block_sparse_moe.experts.5.w3.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.0.w2.weight"),
        ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("deepseek_v3", "model.layers.0.mlp.down_proj.weight"),
        ("deepseek_v3", "model.layers.2.mlp.experts.7.up_proj.weight"),
        ("gpt_oss", "model.layers.1.self_attn.sinks"),
        ("gpt_oss", "model.layers.1.mlp.experts.down_proj_bias"),
        ("qwen3_vl_moe", "model.language_model.layers.0.self_attn.q_norm.weight"),
        ("qwen3_vl_moe", "model.language_model.layers.0.mlp.experts.down_proj"),
    ],
)
def test_a_tensor_that_is_missing(published: Callable[[str], Path], tmp_path: Path, family: str, tensor: str) -> None:
    model = changed(published(family), tmp_path, lambda weights: weights.pop(tensor))
    refused(model, tmp_path, MissingShardError, f"lacks the tensor {tensor}")


def test_one_of_three_matrices_of_every_expert(published: Callable[[str], Path], tmp_path: Path) -> None:
    def change(weights: Weights) -> None:
        for name in [name for name in weights if name.endswith("w3.weight")]:
            del weights[name]

    model = changed(published("mixtral"), tmp_path, change)
    refused(model, tmp_path, MissingShardError, "model.layers.0.block_sparse_moe.experts.0.w3.weight", "4 more")


@pytest.mark.parametrize(
    "tensor", ["lm_head.weight", "model.layers.1.self_attn.k_proj.weight", "model.layers.1.input_layernorm.weight"]
)
def test_a_dense_tensor_of_another_shape(published: Callable[[str], Path], tmp_path: Path, tensor: str) -> None:
    model = changed(published("mixtral"), tmp_path, lambda w: w.update({tensor: w[tensor][:-1].contiguous()}))
    refused(model, tmp_path, CorruptCheckpointError, tensor)


def test_an_expert_of_another_shape(published: Callable[[str], Path], tmp_path: Path) -> None:
    tensor = "model.layers.3.block_sparse_moe.experts.6.w1.weight"
    model = changed(published("mixtral"), tmp_path, lambda w: w.update({tensor: w[tensor][:-1].contiguous()}))
    refused(model, tmp_path, CorruptCheckpointError, tensor, "[63, 64]")


def test_more_layers_than_there_are_weights_for(published: Callable[[str], Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(published("mixtral"), tmp_path / "changed"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    refused(copy, tmp_path, MissingShardError, "layer 4")


@pytest.mark.parametrize("kept", ["lm_head.weight", "model.embed_tokens.weight"])
def test_tied_weights_are_not_demanded(published: Callable[[str], Path], tmp_path: Path, kept: str) -> None:
    """Transformers ties either to the other, whichever there is."""
    both = {"lm_head.weight", "model.embed_tokens.weight"}
    model = changed(published("mixtral"), tmp_path, lambda weights: weights.pop(*(both - {kept})))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    theirs = AutoModelForCausalLM.from_pretrained(model)
    assert theirs.lm_head.weight.equal(theirs.model.embed_tokens.weight)
    shard(open_source(model), tmp_path / "store").verify()


def test_neither_of_two_that_are_tied(published: Callable[[str], Path], tmp_path: Path) -> None:
    def change(weights: Weights) -> None:
        del weights["lm_head.weight"], weights["model.embed_tokens.weight"]

    model = changed(published("mixtral"), tmp_path, change)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    refused(model, tmp_path, MissingShardError, "lm_head.weight, model.embed_tokens.weight")


def test_a_shard_that_is_too_short(tmp_path: Path) -> None:
    model = tmp_path / "model"
    families.build("mixtral").save_pretrained(model, max_shard_size="200KB")
    files = sorted(model.glob("*.safetensors"))
    assert len(files) > 2
    with files[1].open("r+b") as stream:
        stream.truncate(files[1].stat().st_size - 2)
    refused(model, tmp_path, CorruptCheckpointError, files[1].name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "inner"),
    [
        ("qwen3_vl_moe", "bfloat16"),
        ("qwen3_vl_moe", None),
        ("glm4v_moe", None),
        ("kimi_k25", "bfloat16"),
        ("aria", None),
    ],
)
def test_the_experts_of_a_wrapper_have_the_dtype_that_is_asked_for(
    tmp_path: Path, family: str, inner: str | None
) -> None:
    """The language model's own dtype stands in `text_config`; Transformers' `from_pretrained` sets it there, too."""
    model = tmp_path / "model"
    families.build(family).to(torch.bfloat16).save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["dtype"] = inner
    del config["dtype"]
    (model / "config.json").write_text(json.dumps(config))
    for dtype in ("float32", None, "float16"):
        store = shard(open_source(model), tmp_path / f"{dtype}", dtype)
        held = {spec.dtype for layer in store.manifest.layers.values() for spec in layer.tensors}
        assert (store.manifest.dtype, held) == (dtype or "bfloat16", {dtype or "bfloat16"})


def test_a_model_type_that_is_known_by_its_architecture(published: Callable[[str], Path], tmp_path: Path) -> None:
    """As moonshotai/Kimi-K2-Instruct: a DeepSeek-V3 under a name of its own."""
    copy = Path(shutil.copytree(published("deepseek_v3"), tmp_path / "model"))
    config = json.loads((copy / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    store = shard(open_source(copy), tmp_path / "store")
    assert store.manifest.family == "deepseek_v3"
    whole = shard(open_source(published("deepseek_v3")), tmp_path / "other")
    assert store.manifest.layers == whole.manifest.layers


def test_a_model_type_that_nobody_knows_is_answered_in_one_line(
    published: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(published("mixtral"), tmp_path / "model"))
    config = json.loads((copy / "config.json").read_text()) | {"architectures": ["MixtralXForCausalLM"]}
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "mixtrall"}))
    with pytest.raises(CheckpointError, match=r"model_type 'mixtrall'.*did you mean mixtral") as caught:
        shard(open_source(copy), tmp_path / "store")
    assert len(str(caught.value)) < 300
    assert AutoConfig.for_model("mixtral").model_type == "mixtral"
