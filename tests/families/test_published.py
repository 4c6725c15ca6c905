"""Checkpoints as they are published, quantised: the store and its cluster against Transformers' dequantised model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.dense import load_dense
from checkpoint.family import expert_parameters, experts_modules
from checkpoint.native.encoded_linear import EncodedLinear
from checkpoint.native.parameters import ExpertParameters
from checkpoint.sharding import convert, quantised_weight
from checkpoint.sharding.source import open_source
from checkpoint.store import ExpertStore
from support.cases import slow_except
from support.models import families, packed, published
from support.models.checkpoints import build
from support.models.store_making import shard
from support.nodes.exact import check_as_transformers

PROMPT = [5, 17, 3, 88, 41, 9, 9, 60, 2, 71, 33, 12]
TOKENS = 8
Publish = Callable[[Path], Path]
_WHOLE_BLOCKS = {"moe_intermediate_size": 32, "qk_rope_head_dim": 16}
"""Transformers alone cannot dequantise matrices whose last blocks are cut."""


def deepseek(path: Path) -> Path:
    return published.publish_fp8(build("deepseek_v3", **_WHOLE_BLOCKS), path)


def deepseek_cut(path: Path) -> Path:
    """Blocks of 16, and matrices of 24 rows or columns, as DeepSeek-V3 has 128 and 576."""
    return published.publish_fp8(build("deepseek_v3"), path)


def deepseek_mtp(path: Path) -> Path:
    """With a layer more, for the prediction of several tokens, which the model does not have."""
    return published.with_a_layer_more(deepseek(path))


def deepseek_v4(path: Path) -> Path:
    return published.publish_deepseek_v4(families.build("deepseek_v4"), path)


def glm(path: Path) -> Path:
    return published.publish_fp8(build("glm4_moe", moe_intermediate_size=32), path)


def glm_dsa(path: Path) -> Path:
    return published.publish_fp8(families.build("glm_moe_dsa"), path, block=(8, 8))


def gpt_oss(path: Path) -> Path:
    return published.publish_mxfp4(build("gpt_oss", hidden_size=64, intermediate_size=96), path)


def minimax(path: Path) -> Path:
    """Its gates in float32, as MiniMax publishes them: Transformers leaves them so."""
    return published.widen(published.publish_fp8(families.build("minimax_m2"), path), ".gate.weight")


def qwen(path: Path) -> Path:
    return published.publish_fp8(build("qwen3_moe", moe_intermediate_size=32), path)


def qwen_mixed(path: Path) -> Path:
    """One layer's experts and some of another's attention in bfloat16."""
    model = build("qwen3_moe", moe_intermediate_size=32, mlp_only_layers=[])
    return published.publish_fp8(model, path, ("layers.1.mlp.experts", "layers.0.self_attn.q_proj"))


def qwen_whole(path: Path) -> Path:
    """A scale for a whole matrix."""
    return published.publish_fp8(build("qwen3_moe", moe_intermediate_size=32), path, block=None)


def qwen_mxfp8(path: Path) -> Path:
    model = build("qwen3_moe", hidden_size=64, intermediate_size=64, moe_intermediate_size=32)
    return published.publish_fp8(model, path, block=(1, 32), method="mxfp8", scale_fmt="ue8m0")


def awq(path: Path) -> Path:
    return packed.publish_awq(build("qwen3_moe", moe_intermediate_size=32), path)


def gptq(path: Path) -> Path:
    return packed.publish_gptq(build("deepseek_v3"), path)


def gptq_of_8_bits(path: Path) -> Path:
    return packed.publish_gptq(build("qwen3_moe"), path, 8, "gptq_v2")


def gptq_with_inputs_anywhere(path: Path) -> Path:
    """As `desc_act` leaves them."""
    return packed.publish_gptq(build("mixtral"), path, 2, "gptq", shuffled=True)


def bitsandbytes_nf4(path: Path) -> Path:
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    return packed.publish_bitsandbytes(build("qwen3_moe"), path, **settings)


def bitsandbytes_fp4(path: Path) -> Path:
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_compute_dtype": torch.bfloat16}
    return packed.publish_bitsandbytes(build("deepseek_v3"), path, bnb_4bit_use_double_quant=True, **settings)


def bitsandbytes_int8(path: Path) -> Path:
    return packed.publish_bitsandbytes(build("qwen3_moe"), path, load_in_8bit=True)


def bitsandbytes_experts(path: Path) -> Path:
    model = build("qwen3_moe", hidden_size=64, moe_intermediate_size=64)
    return packed.publish_bitsandbytes_experts(model, path)


def kimi(path: Path) -> Path:
    """4 bits in groups, as moonshotai/Kimi-K2-Thinking; gates in float32, which Transformers casts."""
    model = packed.publish_compressed(build("deepseek_v3"), path, {"all": packed.group(**packed.INT4)})
    return published.widen(model, ".gate.weight")


def kimi_that_sees(path: Path) -> Path:
    """As moonshotai/Kimi-K2.5: a language model of 4 bits under names of its own, and an encoder of images."""
    return packed.publish_compressed(families.build("kimi_k25"), path, {"all": packed.group(**packed.INT4)})


def compressed_fp8(path: Path) -> Path:
    model = build("qwen3_moe", moe_intermediate_size=32)
    return packed.publish_compressed(model, path, {"all": packed.group(**packed.FP8)})


def compressed_fp8_blocks(path: Path) -> Path:
    model = build("qwen3_moe", moe_intermediate_size=32)
    blocks = packed.FP8 | {"strategy": "block", "block_structure": [16, 16]}
    return packed.publish_compressed(model, path, {"all": packed.group(**blocks)})


def compressed_mixed(path: Path) -> Path:
    """Experts in 4 bits, attention and shared experts in FP8."""
    groups = {
        "experts": packed.group(".experts.", "re:.*mlp.experts.*", **packed.INT4),
        "rest": packed.group("", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.\w+_proj.*", **packed.FP8),
    }
    return packed.publish_compressed(build("deepseek_v3"), path, groups)


def compressed_asymmetric(path: Path) -> Path:
    group = packed.group(**packed.INT4 | {"symmetric": False})
    return packed.publish_compressed(build("qwen3_moe"), path, {"all": group})


def compressed_int8(path: Path) -> Path:
    group = packed.group(num_bits=8, type="int", symmetric=True, strategy="channel", format="int-quantized")
    return packed.publish_compressed(build("qwen3_moe"), path, {"all": group})


def compressed_nvfp4(path: Path) -> Path:
    model = build("qwen3_moe", hidden_size=64, intermediate_size=64, moe_intermediate_size=32)
    return packed.publish_compressed(model, path, {"all": packed.group(**packed.NVFP4)})


REFERENCES: dict[Publish, Callable[[Path], Any]] = {
    deepseek_cut: published.dequantised_by_definition,
    **dict.fromkeys((awq, gptq, gptq_of_8_bits, gptq_with_inputs_anywhere), packed.restored_by_tool),
    **dict.fromkeys((bitsandbytes_nf4, bitsandbytes_fp4, bitsandbytes_int8), packed.dequantised_bitsandbytes),
    **dict.fromkeys((bitsandbytes_experts, kimi_that_sees), packed.restored_by_tool),
    **dict.fromkeys(
        (compressed_fp8_blocks, compressed_mixed, compressed_asymmetric, compressed_int8, compressed_nvfp4),
        packed.restored_by_tool,
    ),
}
"""Where Transformers itself does not dequantise a checkpoint, what its format's tool or definition makes of it."""
BLOCKS = (
    *(deepseek, deepseek_cut, deepseek_mtp, deepseek_v4, glm, glm_dsa, gpt_oss, minimax),
    *(qwen, qwen_mixed, qwen_mxfp8, qwen_whole),
)
PACKED = (
    *(awq, gptq, gptq_of_8_bits, gptq_with_inputs_anywhere),
    *(bitsandbytes_nf4, bitsandbytes_fp4, bitsandbytes_int8, bitsandbytes_experts),
    *(
        kimi,
        kimi_that_sees,
        compressed_fp8,
        compressed_fp8_blocks,
        compressed_mixed,
        compressed_asymmetric,
        compressed_int8,
        compressed_nvfp4,
    ),
)


EXPERTS = ("native", "dequantised")
DEQUANTISED_TOO = (deepseek_v4, gpt_oss, awq)
"""Those whose clusters answer from dequantised experts, too. Other stores of these are computed with as packed ones
are: their experts and their dense part are compared bit for bit."""


class Case:
    """A published checkpoint, Transformers' dequantised model of it, and its stores by how experts are kept."""

    def __init__(self, publish: Publish, folder: Path) -> None:
        self.publish = publish
        self.path = publish(folder / "model")
        self.model = REFERENCES.get(publish, published.dequantised)(self.path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(convert, "_PART_BYTES", 1)  # an expert at a time, as where it has more than 32 MiB
            patch.setattr(quantised_weight, "_PIECE_BYTES", 1)
            self.stores: dict[str, ExpertStore] = {
                experts: shard(open_source(self.path), folder / experts, experts=experts)
                for experts in (EXPERTS if publish in (*BLOCKS, *DEQUANTISED_TOO) else ("native",))
            }


def stored(store: ExpertStore, layer: int, expert: int) -> dict[str, torch.Tensor]:
    """An expert's parameters, from the store's file, in memory of their own."""
    file, blob = store.locate(layer, expert)
    held = bytearray(file.read_bytes()[blob.offset :][: blob.length])
    return ExpertParameters(store.manifest, threads=1).of(torch.frombuffer(held, dtype=torch.uint8), layer)


DENSE_DEQUANTISED = (
    gpt_oss,
    bitsandbytes_nf4,
    bitsandbytes_fp4,
    bitsandbytes_int8,
    bitsandbytes_experts,
    compressed_mixed,
    compressed_nvfp4,
)
"""Those whose dense part may have no weight that a store can keep in published numbers."""

FAST = (deepseek, gpt_oss, awq, gptq, bitsandbytes_experts, kimi, compressed_nvfp4)
"""One of each format, in `make test`."""


@pytest.fixture(
    scope="module", params=slow_except(FAST, [*BLOCKS, *PACKED]), ids=[case.__name__ for case in (*BLOCKS, *PACKED)]
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("published"))


@pytest.mark.slow
def test_the_experts_of_the_dequantised_model(case: Case) -> None:
    for layer, (name, module) in experts_modules(case.model).items():
        for key, expected in expert_parameters(name, module).items():
            for how, store in case.stores.items():
                found = [stored(store, layer, expert)[key] for expert in range(len(expected))]
                assert torch.equal(torch.stack(found), expected), f"{how}, layer {layer}: {key}"


def test_the_dense_part_of_the_dequantised_model(case: Case) -> None:
    expected = case.model.state_dict()
    text = {key for key in expected if ".vision_tower." not in key}
    for store in case.stores.values():
        state: dict[str, Any] = load_dense(store.dense, store.manifest.config, torch.bfloat16).state_dict()
        assert state.keys() == {key for key in text if ".experts." not in key or "shared" in key}
        for key, value in state.items():
            assert value.dtype == expected[key].dtype, key
            assert torch.equal(value, expected[key]), key


def test_tokens_and_logits_of_the_dequantised_model(case: Case, record_property: Any) -> None:
    record_property("family", case.stores["native"].manifest.family)
    record_property("published as", published.format_name(case.path))
    for experts in EXPERTS if case.publish in DEQUANTISED_TOO else ("native",):
        check_as_transformers(case.model, case.path, case.stores[experts], PROMPT, TOKENS)


@pytest.mark.slow
def test_the_dense_part_in_published_numbers(case: Case, tmp_path: Path) -> None:
    store = shard(open_source(case.path), tmp_path / "store", dense="published")
    model = load_dense(store.dense, store.manifest.config, torch.bfloat16)
    encoded = {name: layer for name, layer in model.named_modules() if isinstance(layer, EncodedLinear)}
    assert encoded or case.publish in DENSE_DEQUANTISED
    for name, layer in encoded.items():
        assert torch.equal(layer.weight, case.model.get_parameter(f"{name}.weight")), name
    check_as_transformers(case.model, case.path, store, PROMPT, TOKENS)


def test_mxfp4_in_float32(tmp_path: Path) -> None:
    path = gpt_oss(tmp_path / "model")
    model = published.dequantised(path, "float32")
    store = shard(open_source(path), tmp_path / "store", "float32")
    (name, module) = experts_modules(model)[1]
    for key, expected in expert_parameters(name, module).items():
        assert expected.dtype == torch.float32
        assert torch.equal(stored(store, 1, 2)[key], expected[2]), key


def test_experts_that_are_not_quantised_have_the_dtype_of_the_others(tmp_path: Path) -> None:
    """Transformers leaves them in bfloat16, and cannot run the model."""
    path = qwen_mixed(tmp_path / "model")
    store = shard(open_source(path), tmp_path / "store", "float32")
    model = published.dequantised(path)
    for layer in (0, 1):
        for key, found in stored(store, layer, 3).items():
            assert found.dtype == torch.float32
            assert torch.equal(found.bfloat16(), dict(experts_modules(model)[layer][1].named_parameters())[key][3])
