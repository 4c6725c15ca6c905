"""Random checkpoints in published formats, against Transformers: it reads every tensor, and what it reads is finite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.quantizers.auto import AutoQuantizationConfig

from scheduler.errors import ConfigError
from scripts.checkpoints.make import shards, write
from scripts.checkpoints.models import MODELS, weights
from scripts.checkpoints.weights import BF16, FP8, MXFP4, Weight, fp8

SMALL: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {"num_local_experts": 8, "intermediate_size": 64, "head_dim": 32},
    "qwen3-30b-a3b": {"num_experts": 8, "moe_intermediate_size": 64, "head_dim": 32, "num_experts_per_tok": 4},
    "deepseek-v3": {
        "n_routed_experts": 32,
        "moe_intermediate_size": 128,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 128,
    },
}
VOCABULARY = 512


@pytest.fixture(scope="module", params=SMALL)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Narrow, so that it is written at once; in several shards."""
    model = MODELS[request.param]
    common = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    narrow = model.config(2, None, VOCABULARY) | common | SMALL[model.name]
    if model.name == "deepseek-v3":
        narrow |= {"num_key_value_heads": 4, "intermediate_size": 512}
    return write(model, narrow, tmp_path_factory.mktemp("published"), shard_bytes=1 << 19)


def _read(checkpoint: Path) -> tuple[Any, dict[str, Any]]:
    """Transformers' model, dequantised, and what it says of the loading."""
    quantised = json.loads((checkpoint / "config.json").read_text()).get("quantization_config")
    given = {}
    if quantised:
        given["quantization_config"] = AutoQuantizationConfig.from_dict(quantised | {"dequantize": True})
    return AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True, dtype=torch.bfloat16, **given)


def test_transformers_reads_every_tensor_and_chooses_different_experts(checkpoint: Path) -> None:
    model, told = _read(checkpoint)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    for name, weight in model.named_parameters():
        if ".experts." in name and "bias" not in name:
            assert 0.015 < float(weight.detach().float().std()) < 0.03, name
    chosen: list[torch.Tensor] = []
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(lambda _, given: chosen.append(given[1]))
    logits = model(torch.arange(64)[None]).logits
    assert torch.isfinite(logits).all()
    assert float(logits.detach().float().std()) > 0.1
    assert len(chosen) == 2
    for index in chosen:
        assert len(index.unique()) == next(m.num_experts for m in model.modules() if hasattr(m, "num_experts"))


def test_a_checkpoint_is_in_several_shards_and_repeatable(checkpoint: Path) -> None:
    files = sorted(checkpoint.glob("*.safetensors"))
    assert len(files) > 2
    assert [file.name for file in files] == [
        f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)
    ]


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        (
            "gpt-oss-20b",
            {
                "model.layers.0.mlp.experts.gate_up_proj_blocks": ((32, 5760, 90, 16), "U8"),
                "model.layers.0.mlp.experts.gate_up_proj_scales": ((32, 5760, 90), "U8"),
                "model.layers.0.mlp.experts.gate_up_proj_bias": ((32, 5760), "BF16"),
                "model.layers.0.mlp.experts.down_proj_blocks": ((32, 2880, 90, 16), "U8"),
                "model.layers.0.self_attn.sinks": ((64,), "BF16"),
            },
        ),
        ("qwen3-30b-a3b", {"model.layers.5.mlp.experts.127.down_proj.weight": ((2048, 768), "BF16")}),
        (
            "deepseek-v3",
            {
                "model.layers.2.mlp.experts.255.up_proj.weight": ((2048, 7168), "F8_E4M3"),
                "model.layers.2.mlp.experts.255.up_proj.weight_scale_inv": ((16, 56), "F32"),
                "model.layers.0.mlp.down_proj.weight": ((7168, 18432), "F8_E4M3"),
                "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv": ((5, 56), "F32"),
                "lm_head.weight": ((129280, 7168), "BF16"),
            },
        ),
    ],
)
def test_tensors_of_full_width_have_the_published_names_and_shapes(name: str, tensors: dict[str, Any]) -> None:
    """Of a checkpoint that is not written. The shapes are those of the published checkpoints."""
    made: dict[str, tuple[tuple[int, ...], str]] = {}
    for weight in weights(MODELS[name], MODELS[name].config(None, None, None)):
        *rows, columns = weight.shape
        if weight.encoding == MXFP4:
            made[f"{weight.name}_blocks"] = ((*rows, columns // 32, 16), "U8")
            made[f"{weight.name}_scales"] = ((*rows, columns // 32), "U8")
        elif weight.encoding == FP8:
            made[weight.name] = (weight.shape, "F8_E4M3")
            made[f"{weight.name}_scale_inv"] = ((-(-rows[0] // 128), -(-columns // 128)), "F32")
        else:
            made[weight.name] = (weight.shape, "F32" if weight.wide else "BF16")
    for tensor, expected in tensors.items():
        assert made[tensor] == expected


def test_what_is_drawn_has_the_names_and_sizes_that_were_planned(tmp_path: Path) -> None:
    for weight in (
        Weight("a", (96, 64), BF16, 0.02),
        Weight("b", (200, 300), FP8, 0.02),
        Weight("c", (2, 64, 96), MXFP4, 0.02),
    ):
        drawn = weight.draw(torch.Generator().manual_seed(0))
        assert sum(value.nbytes for value in drawn.values()) == weight.nbytes
        save_file(drawn, tmp_path / "file")
        with safe_open(tmp_path / "file", "pt") as file:
            assert set(file.keys()) == set(drawn)


def test_blocks_of_fp8_keep_three_bits_of_each_value() -> None:
    """E4M3 has three bits of mantissa, so a normal value is off by a sixteenth of itself at most."""
    values = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    quantised, scale = fp8(values)
    assert scale.shape == (2, 3)
    for row, column in ((0, 0), (127, 127), (128, 128), (199, 299)):
        restored = float(quantised[row, column].float() * scale[row // 128, column // 128])
        assert abs(restored - float(values[row, column])) <= abs(float(values[row, column])) / 16 + 1e-3


def test_no_shard_is_longer_than_asked_unless_one_weight_is() -> None:
    held = [Weight(str(n), (size, 1), BF16) for n, size in enumerate((10, 20, 30, 100, 5))]
    assert [[one.name for one in shard] for shard in shards(held, 100)] == [["0", "1"], ["2"], ["3"], ["4"]]


@pytest.mark.parametrize(
    ("name", "experts", "allowed"),
    [("deepseek-v3", 8, "16, 24, 32"), ("deepseek-v3", 20, "16, 24, 32"), ("qwen3-30b-a3b", 4, "8, 9, 10")],
)
def test_experts_that_the_gate_cannot_choose_from_are_refused(name: str, experts: int, allowed: str) -> None:
    with pytest.raises(ConfigError, match=f"{experts} experts; {name} allows {allowed}"):
        MODELS[name].config(1, experts, 64)


def test_the_fewest_experts_can_be_chosen_from() -> None:
    config = MODELS["deepseek-v3"].config(1, 16, 64) | {"hidden_size": 32, "moe_intermediate_size": 16}
    config |= {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 16}
    del config["quantization_config"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
