"""The model of a plan: its sizes are those of Transformers, and what `odmoe shard` refuses is refused alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checkpoint import family as families_of_transformers
from checkpoint import kv
from checkpoint.family import config_from_dict
from checkpoint.formats.settings import is_surely_readable
from checkpoint.sharding.source import open_source
from odmoe.api.plan_model import model_of, read_config
from scheduler.errors import CheckpointError, ODMoEError, UnsupportedFormatError
from scheduler.types import ModelSize
from support.models import families
from support.models.store_making import shard
from support.paths import CONFIGS

WRAPPERS = ("aria", "glm4v_moe", "kimi_k25", "minimax_m3_vl", "mistral4", "mistral_large4", "qwen3_vl_moe")
QWEN3_VL_30B: dict[str, Any] = {
    "model_type": "qwen3_vl_moe",
    "text_config": {
        "model_type": "qwen3_vl_moe_text",
        "dtype": "bfloat16",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
    },
}
"""What its sizes depend on, of the config.json of Qwen/Qwen3-VL-30B-A3B-Instruct."""
FEW_LAYERS: dict[str, Any] = QWEN3_VL_30B | {"text_config": QWEN3_VL_30B["text_config"] | {"num_hidden_layers": 2}}


def planned(path: Path, aligned: bool = True) -> ModelSize:
    found = read_config(str(path))
    return model_of(path.name, found.fields, found.dtype, 64, found.experts, aligned, found.native_bits)


def written(folder: Path, fields: dict[str, Any], dtype: torch.dtype | None = torch.bfloat16) -> Path:
    """A directory with this config.json and, unless `dtype` is None, weights of one tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    if dtype is not None:
        save_file({"model.norm.weight": torch.ones(64, dtype=dtype)}, folder / "model.safetensors")
    return folder


def without_dtypes(fields: dict[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in fields.items() if key not in ("dtype", "torch_dtype")}
    return {key: without_dtypes(value) if isinstance(value, dict) else value for key, value in plain.items()}


# --- the dtype --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_expert_of_qwen3_vl_30b(tmp_path: Path) -> None:
    """Three matrices of 2048 x 768 in bfloat16: 9.44 MB."""
    found = planned(written(tmp_path, QWEN3_VL_30B, None))
    assert (found.expert_bytes, found.dtype, found.layers) == (3 * 2048 * 768 * 2, "bfloat16", 48)


@pytest.mark.parametrize("family", [*families.every(families.TESTED), *WRAPPERS])
def test_bytes_of_an_expert_are_those_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the dtype is named. The model itself says how large its experts are."""
    config = families.configuration(family)
    with torch.device("meta"):
        model = families.auto_class(family).from_config(config, dtype=torch.float16)
    one = max(
        sum(value.nbytes for value in module.parameters()) // module.num_experts
        for module in model.modules()
        if families_of_transformers.is_experts_module(module)
    )
    # What passes over the model say, which take most of the time, is no part of this.
    monkeypatch.setattr(families_of_transformers, "_routed_width", lambda config: 1)
    monkeypatch.setattr("checkpoint.sizes.model_size._cache_bytes", lambda *_: (0, 0))
    plain = without_dtypes(json.loads(config.to_json_string(use_diff=False)))
    places = [plain | {"dtype": "float16"}, plain | {"torch_dtype": "float16"}]
    if "text_config" in plain:
        places.append(plain | {"text_config": plain["text_config"] | {"dtype": "float16"}})
    for fields in places:
        found = planned(written(tmp_path, fields, None))
        assert (found.dtype, found.expert * found.item_bytes) == ("float16", one)


def test_without_a_dtype_it_is_that_of_the_weights(tmp_path: Path) -> None:
    """As in `odmoe shard`. Of a configuration alone it is float32; published quantised weights come with bfloat16."""
    fields = without_dtypes(json.loads((CONFIGS / "mixtral-8x7b.json").read_text()))
    assert planned(written(tmp_path / "half", fields, torch.float16)).dtype == "float16"
    assert planned(written(tmp_path / "half", fields | {"dtype": "bfloat16"}, torch.float16)).dtype == "bfloat16"
    assert planned(written(tmp_path / "alone", fields, None)).dtype == "float32"
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert planned(written(tmp_path / "fp8", fields | fp8, None)).dtype == "bfloat16"
    text = FEW_LAYERS["text_config"] | {"dtype": "float16"}
    assert planned(written(tmp_path / "nested", FEW_LAYERS | {"text_config": text} | fp8, None)).dtype == "float16"


# --- what is refused --------------------------------------------------------------------------------------------------

FORMATS: dict[str, Any] = {
    "NVFP4 of ModelOpt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "AQLM": {"quant_method": "aqlm"},
    "MLX": {"group_size": 64, "bits": 4},
    "words": "int4",
    "GPTQ of 3 bits": {"quant_method": "gptq", "bits": 3},
    "AWQ for GEMV": {"quant_method": "awq", "version": "gemv"},
    "blocks of one side": {"quant_method": "fp8", "weight_block_size": [128]},
    "blocks of no size": {"quant_method": "fp8", "weight_block_size": [0, 128]},
    "a static scale": {"quant_method": "fp8", "activation_scheme": "nosuch"},
    "sparse": {"quant_method": "compressed-tensors", "sparsity_config": {"format": "x"}},
    "no groups": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "skipped by a number": {"quant_method": "mxfp4", "modules_to_not_convert": 5},
}


def both(path: Path) -> tuple[str, str]:
    """What plan and shard answer."""
    said = []
    for act in (lambda: planned(path), lambda: shard(open_source(path), path.parent / "store")):
        try:
            act()
            said.append("nothing")
        except ODMoEError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said[0], said[1]


@pytest.mark.slow
@pytest.mark.parametrize("case", FORMATS)
@pytest.mark.parametrize("where", ["", "text_config"])
def test_a_format_that_shard_refuses(case: str, where: str, tmp_path: Path) -> None:
    fields = json.loads(json.dumps(FEW_LAYERS if where else {"model_type": "mixtral"}))
    (fields[where] if where else fields)["quantization_config"] = FORMATS[case]
    plan, store = both(written(tmp_path / "model", fields))
    if "UnsupportedFormatError" in store:
        assert plan == store
    else:  # shard needs the weights to refuse it
        assert store.split(":")[0] in ("MissingShardError", "CorruptCheckpointError")
    assert "UnsupportedFormatError" in plan or case == "skipped by a number"


@pytest.mark.parametrize("name", ["directory", "file"])
def test_a_format_in_a_file_of_its_own(name: str, tmp_path: Path) -> None:
    path = written(tmp_path / "model", json.loads((CONFIGS / "mixtral-8x7b.json").read_text()))
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (path / "hf_quant_config.json").write_text(json.dumps(settings))
    plan, store = both(path)
    assert plan == store
    with pytest.raises(UnsupportedFormatError, match=r"NVIDIA ModelOpt \(NVFP4\)"):
        read_config(str(path if name == "directory" else path / "config.json"))


@pytest.mark.slow
@pytest.mark.parametrize("family", families.REFUSED)
def test_a_family_that_shard_refuses(family: str, tmp_path: Path) -> None:
    plan, store = both(written(tmp_path / "model", {"model_type": family}))
    assert plan == store
    error, words = families.REFUSED[family]
    assert plan.startswith(error.__name__)
    assert words in plan


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "nosuch"},
        {"model_type": "nosuch", "quantization_config": {"quant_method": "aqlm"}},
        {"model_type": "mixtral", "hidden_act": "nosuch"},
        {"model_type": "mixtral", "dtype": "float64"},
        {"model_type": "mixtral", "hidden_size": -1},
    ],
)
def test_a_configuration_that_shard_refuses(fields: dict[str, Any], tmp_path: Path) -> None:
    plan, store = both(written(tmp_path / "model", fields))
    assert plan == store != "nothing"


def test_weights_that_shard_does_not_read(tmp_path: Path) -> None:
    path = written(tmp_path / "model", {"model_type": "mixtral"}, None)
    (path / "pytorch_model.bin").touch()
    plan, store = both(path)
    assert plan == store
    assert "PyTorch .bin" in plan


def test_a_cache_that_cannot_be_aligned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As `odmoe generate` refuses it; without a shadow it can be planned."""
    fields = json.loads(families.configuration("jamba").to_json_string())
    path = written(tmp_path, fields, None)
    assert planned(path).experts == 8
    monkeypatch.delitem(kv._KINDS, "LinearAttentionLayer")
    with pytest.raises(ODMoEError) as expected:
        kv.kinds(config_from_dict(fields))
    with pytest.raises(ODMoEError) as caught:
        planned(path)
    assert str(caught.value) == str(expected.value)
    assert planned(path, aligned=False).experts == 8


@pytest.mark.parametrize("settings", [None, {}, *FORMATS.values(), {"quant_method": "mxfp4"}, {"quant_method": "fp8"}])
def test_what_is_surely_readable_is_read(settings: Any, tmp_path: Path) -> None:
    from checkpoint.formats.published import check_format

    full = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
    for one in (settings, full):
        fields = {"quantization_config": one}
        if is_surely_readable(fields, tmp_path):
            check_format(fields, tmp_path)
    assert is_surely_readable({"quantization_config": full}, tmp_path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_config(str(tmp_path))
