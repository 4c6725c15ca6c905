"""What a plan counts for an expert as published, beside the bytes that a store of one has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from checkpoint.native.encodings import ENCODINGS
from checkpoint.sharding.source import open_source
from checkpoint.sizes.integer_groups import integer_groups
from checkpoint.store import ExpertStore
from checkpoint.tensors import PAGE
from odmoe.api.plan_model import model_of, read_config
from scheduler.errors import UnsupportedFormatError
from scheduler.types import ModelSize
from support.models import families, gguf_files, packed, published
from support.models.checkpoints import build
from support.models.store_making import shard
from support.paths import ROOT

CONFIGS = ROOT / "tests" / "data" / "configs"
MXFP4 = {"quant_method": "mxfp4"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
KIMI_K2 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def compressed(*targets: str, **weights: Any) -> dict[str, Any]:
    """As moonshotai/Kimi-K2-Thinking, but for these settings of weights."""
    group = {"targets": targets or ["Linear"], "weights": KIMI_K2 | weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


MATRICES = {"gpt-oss-120b": ((2880, 5760), (2880, 2880)), "deepseek-v3": ((4096, 7168), (7168, 2048))}


def planned(config: str, quantisation: dict[str, Any] | None, experts: str | None = None, **more: Any) -> ModelSize:
    fields = json.loads((CONFIGS / f"{config}.json").read_text()) | more
    fields |= {"quantization_config": quantisation} if quantisation else {}
    return model_of(config, fields, "bfloat16", 4096, experts)


@pytest.mark.parametrize(
    ("config", "quantisation", "share"),
    [
        ("gpt-oss-120b", MXFP4, 0.27),
        ("gpt-oss-120b", MXFP4 | {"modules_to_not_convert": published.MXFP4_SKIPPED}, 0.27),
        ("deepseek-v3", FP8, 0.51),
        ("deepseek-v3", {"quant_method": "fp8"}, 0.51),  # the same blocks, by default
        ("deepseek-v3", FP8 | {"modules_to_not_convert": ["lm_head", "model.layers.3.mlp.gate"]}, 0.51),
        ("deepseek-v3", FP8 | {"modules_to_not_convert": ["model.layers.2.mlp"]}, 0.51),  # it has no experts
        ("qwen3-30b-a3b", {"quant_method": "mxfp8", "weight_block_size": [1, 32]}, 0.52),
        ("qwen3-30b-a3b", {"quant_method": "awq", "bits": 4, "group_size": 128}, 0.265),
        ("qwen3-30b-a3b", {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, 0.266),
        ("deepseek-v3", {"quant_method": "gptq", "bits": 8, "group_size": -1}, 0.501),
        ("deepseek-v3", compressed(), 0.282),
        ("deepseek-v3", compressed("re:.*mlp.experts.*", num_bits=8, strategy="channel"), 0.501),
        ("deepseek-v3", compressed(num_bits=8, type="float", strategy="channel"), 0.501),
        ("deepseek-v3", compressed(num_bits=8, type="float", strategy="block", block_structure=[128, 128]), 0.501),
        ("deepseek-v3", compressed(type="float", strategy="tensor_group", group_size=16), 0.282),
        ("deepseek-v3", {"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.282),
        ("deepseek-v3", {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, 0.259),
        ("deepseek-v3", {"quant_method": "bitsandbytes", "load_in_8bit": True}, 0.501),
    ],
)
def test_bytes_of_a_load_and_of_a_store(config: str, quantisation: dict[str, Any], share: float) -> None:
    plain, native = planned(config, None), planned(config, quantisation)
    assert native.expert_bytes / plain.expert_bytes < share
    assert native.store_bytes / plain.store_bytes < share
    assert (plain.restoring_bytes, native.restored_bytes) == (0, plain.expert_bytes)
    assert planned(config, quantisation, "dequantised") == plain


@pytest.mark.parametrize(("config", "quantisation"), [("gpt-oss-120b", MXFP4), ("deepseek-v3", FP8)])
def test_memory_to_restore_on_a_gpu(config: str, quantisation: dict[str, Any]) -> None:
    size, (_, scratch) = (
        planned(config, quantisation),
        ENCODINGS[quantisation["quant_method"]].scratch_for(MATRICES[config], "cuda", 1),
    )
    assert size.restoring_bytes - size.restored_bytes == pytest.approx(scratch, rel=0.01)
    assert scratch > size.restored_bytes / 2, "it is worth counting"


@pytest.mark.parametrize(
    ("config", "quantisation"),
    [
        ("deepseek-v3", None),
        ("deepseek-v3", {"load_in_4bit": True, "llm_int8_skip_modules": ["lm_head", "experts"]}),
        ("deepseek-v3", {"quant_method": "awq", "bits": 4, "group_size": 96}),
        ("deepseek-v3", {"quant_method": "gptq", "bits": "4", "group_size": 128}),
        ("deepseek-v3", compressed(type="float", strategy="tensor_group", group_size=48)),
        ("deepseek-v3", compressed(num_bits=8, type="float", strategy="block", block_structure=[96, 128])),
        ("deepseek-v3", compressed() | {"ignore": ["re:.*experts.*"]}),
        ("deepseek-v3", {"quant_method": "fp8", "weight_block_size": None}),
        ("deepseek-v3", "fp8"),
        ("deepseek-v3", {"quant_method": ["mxfp4"]}),
        ("deepseek-v3", FP8 | {"expert_dtype": ["fp8"]}),
        ("deepseek-v3", FP8 | {"expert_dtype": "fp4"}),
        ("deepseek-v3", FP8 | {"weight_block_size": [128, 129]}),
        ("deepseek-v3", FP8 | {"weight_block_size": [4096, 128]}),  # a projection has 2048 rows
        ("deepseek-v3", FP8 | {"modules_to_not_convert": ["experts"]}),
        ("deepseek-v3", FP8 | {"modules_to_not_convert": ["model.layers.*.mlp"]}),
        ("gpt-oss-120b", MXFP4 | {"modules_to_not_convert": ["mlp.experts"]}),
    ],
)
def test_experts_that_are_stored_dequantised(config: str, quantisation: Any) -> None:
    assert planned(config, quantisation) == planned(config, None)


@pytest.mark.parametrize("named", [True, "model.layers.3", {"model.layers.3": 1}])
def test_modules_that_are_no_list_are_refused(named: Any) -> None:
    with pytest.raises(UnsupportedFormatError, match=r"modules_to_not_convert .* must be a list of names"):
        planned("deepseek-v3", FP8 | {"modules_to_not_convert": named})


def test_slots_are_as_large_as_the_largest_experts() -> None:
    size = planned("deepseek-v3", FP8 | {"modules_to_not_convert": ["model.layers.3"]})
    assert size.expert_bytes == size.restored_bytes == planned("deepseek-v3", None).expert_bytes


@pytest.mark.slow
def test_fp8_in_blocks_is_kept_in_the_dtype_of_its_scales() -> None:
    blocks = compressed(num_bits=8, type="float", strategy="block", block_structure=[128, 128])
    rows = compressed(num_bits=8, type="float", strategy="channel")
    fields = json.loads((CONFIGS / "qwen3-30b-a3b.json").read_text()) | {"torch_dtype": "bfloat16"}
    sizes = {
        dtype: [
            model_of("m", fields | {"quantization_config": one}, dtype, 4096).native_bits > 0 for one in (blocks, rows)
        ]
        for dtype in (None, "bfloat16", "float16")
    }
    assert sizes == {None: [True, True], "bfloat16": [True, True], "float16": [False, True]}


@pytest.mark.parametrize(
    ("dynamic", "bits"),
    [
        ({}, 4 + 24 / 128),
        ({"-:.*self_attn.*": {}, r".*mlp\.experts.*": {"bits": 8}}, 8 + 24 / 128),
        ({r"+:.*down_proj": {"bits": 8}}, 16 / 3 + 24 / 128),
        ({r"-:model\.layers\.5\.": {}}, 16),
        ({r"model\.layers\.5\..*": {"group_size": 32}}, 4 + 24 / 32),
        ({r".*gate_proj": {"bits": 8}}, 0),
        ({"-:.*down_proj": {}}, 0),
        ({"-:.*experts": {}, ".*": {"bits": 8}}, 0),
        ({"(": {"bits": 8}}, 4 + 24 / 128),
    ],
)
def test_layers_of_gptq_that_differ(dynamic: dict[str, Any], bits: float) -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": dynamic}
    assert planned("deepseek-v3", settings).native_bits == pytest.approx(bits)


def test_fp4_experts_may_be_named_beside_the_settings() -> None:
    """As DeepSeek-V4's config.json has them."""
    assert planned("deepseek-v3", FP8, expert_dtype="fp4", num_hidden_layers=4).native_bits == 0


def test_settings_of_the_language_model(tmp_path: Path) -> None:
    fields = json.loads((CONFIGS / "qwen3-30b-a3b.json").read_text())
    settings = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
    text = fields | {"num_hidden_layers": 2, "vocab_size": 64, "model_type": "qwen3_vl_moe_text", "dtype": "bfloat16"}
    whole = {"model_type": "qwen3_vl_moe", "dtype": "bfloat16"}
    plain = model_of("m", whole | {"text_config": text}, None, 64)
    native = model_of("m", whole | {"text_config": text | {"quantization_config": settings}}, None, 64)
    assert native.native_bits == 8.25
    assert native.expert_bytes < 0.52 * plain.expert_bytes


def gpt_oss(path: Path) -> Path:
    return published.publish_mxfp4(build("gpt_oss", hidden_size=64, intermediate_size=96), path)


def qwen(path: Path) -> Path:
    return published.publish_fp8(build("qwen3_moe", hidden_size=256, moe_intermediate_size=128), path, (), (128, 128))


def narrow_qwen(path: Path) -> Path:
    """Half a block of the experts' rows is missing."""
    return published.publish_fp8(build("qwen3_moe", hidden_size=256, moe_intermediate_size=192), path, (), (128, 128))


def plain_qwen(path: Path) -> Path:
    """Only attention is in FP8."""
    model = build("qwen3_moe", hidden_size=256, moe_intermediate_size=128)
    return published.publish_fp8(model, path, ("experts",), (128, 128))


def half_plain_qwen(path: Path) -> Path:
    """One of two layers has its experts in bfloat16."""
    model = build("qwen3_moe", hidden_size=256, moe_intermediate_size=128, mlp_only_layers=[0])
    return published.publish_fp8(model, path, ("model.layers.2.mlp",), (128, 128))


def deepseek_v4(path: Path) -> Path:
    return published.publish_deepseek_v4(families.build("deepseek_v4"), path)


def gptq(path: Path) -> Path:
    model = build("qwen3_moe", hidden_size=256, moe_intermediate_size=64, intermediate_size=64)
    return packed.publish_gptq(model, path, shuffled=True, group=32)


def gptq_of_several_bits(dynamic: dict[str, int]) -> Callable[[Path], Path]:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 64, "intermediate_size": 64}
    model = build("qwen3_moe", **sizes, mlp_only_layers=[])
    return lambda path: packed.publish_gptq(model, path, group=32, dynamic=dynamic)


def awq(path: Path) -> Path:
    model = build("qwen3_moe", hidden_size=256, moe_intermediate_size=64, intermediate_size=64)
    return packed.publish_awq(model, path, group=32)


def kimi(path: Path) -> Path:
    model = build("qwen3_moe", hidden_size=256, moe_intermediate_size=128, intermediate_size=64)
    return packed.publish_compressed(model, path, {"all": packed.group(**packed.INT4 | {"group_size": 32})})


def bitsandbytes(kind: str, nested: bool) -> Callable[[Path], Path]:
    model = build("qwen3_moe", hidden_size=448, moe_intermediate_size=128, intermediate_size=64)
    return lambda path: packed.publish_bitsandbytes_experts(model, path, kind, nested)


def plain_experts(path: Path) -> Path:
    return packed.publish_bitsandbytes(build("qwen3_moe", hidden_size=128), path, load_in_8bit=True)


def compressed_fp4(weights: dict[str, Any]) -> Callable[[Path], Path]:
    model = build("qwen3_moe", hidden_size=256, moe_intermediate_size=128, intermediate_size=64)
    return lambda path: packed.publish_compressed(model, path, {"all": packed.group(**weights)})


def gguf(kind: Kind) -> Callable[[Path], Path]:
    model = build("qwen3_moe", hidden_size=256, moe_intermediate_size=128, mlp_only_layers=[])
    return lambda path: gguf_files.publish(model, path.with_suffix(".gguf"), kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("publish", "encoding", "experts"),
    [
        (gptq, "integers", "native"),
        (gptq_of_several_bits({r".*down_proj": 8}), "integers", "native"),
        (gptq_of_several_bits({r"model\.layers\.1\..*experts": 8}), "integers", "native"),
        (gptq_of_several_bits({r"model\.layers\.1\..*experts": 0}), "integers", "native"),
        (gptq_of_several_bits({r".*down_proj": 0}), "", "native"),
        (gptq_of_several_bits({r".*gate_proj": 8}), "", "native"),
        (awq, "integers", "native"),
        (awq, "integers", "dequantised"),
        (kimi, "integers", "native"),
        (gguf(Kind.Q5_1), "ggml integers", "native"),
        (gguf(Kind.Q5_1), "ggml integers", "dequantised"),
        (gguf(Kind.IQ4_NL), "ggml codebook", "native"),
        (gguf(Kind.F16), "", "native"),
        (bitsandbytes("nf4", False), "codebook", "native"),
        (bitsandbytes("fp4", True), "codebook", "native"),
        (bitsandbytes("int8", False), "codebook", "native"),
        (plain_experts, "", "native"),
        (compressed_fp4(packed.NVFP4), "codebook", "native"),
        (compressed_fp4(packed.MXFP4), "codebook", "native"),
        (gpt_oss, "mxfp4", "native"),
        (gpt_oss, "mxfp4", "dequantised"),
        (qwen, "fp8", "native"),
        (qwen, "fp8", "dequantised"),
        (narrow_qwen, "", "native"),
        (plain_qwen, "", "native"),
        (half_plain_qwen, "fp8", "native"),
        (deepseek_v4, "", "native"),
    ],
)
def test_a_store_has_as_many(publish: Callable[[Path], Path], encoding: str, experts: str, tmp_path: Path) -> None:
    path = publish(tmp_path / "model")
    store = shard(open_source(path), tmp_path / "store", experts=experts)
    assert store.manifest.encoding == (encoding if experts == "native" else "")
    for given in (path, store.path):
        check_size(given, store, experts)


def check_size(given: Path, store: ExpertStore, experts: str) -> None:
    """The plan of a store knows how it keeps experts; that of a checkpoint is asked for it."""
    found = read_config(str(given))
    size = model_of("tiny", found.fields, found.dtype, 64, found.experts or experts, native_bits=found.native_bits)
    assert abs(size.expert_bytes - store.manifest.blob_bytes) <= PAGE
    restored = store.manifest.restored_bytes if store.manifest.encoding else 0
    assert abs(size.restored_bytes - restored) <= PAGE


def test_groups_of_gptq_that_do_not_divide_a_row_have_an_order() -> None:
    """Of the others' they are dequantised. 96 columns are 3 groups of 40 inputs, the last of 16."""
    settings = {"bits": 4, "group_size": 40}
    gptq_groups, awq_groups = (integer_groups(method, settings) for method in ("gptq", "awq"))
    assert gptq_groups is not None
    assert awq_groups is not None
    assert gptq_groups.bits_of(96, 96, 192) == 4 + (3 * 24 * 3 + 3 * 16) / (96 * 3)
    assert awq_groups.bits_of(96, 96, 192) == 0
