"""Stores that keep integers with group scales as published, beside dequantised stores of the same checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from checkpoint.sharding import convert
from checkpoint.sharding.source import open_source
from checkpoint.sharding.weights import places
from checkpoint.store import ExpertStore
from scheduler.errors import CorruptCheckpointError
from support.cases import slow_except
from support.models import gguf_files, packed
from support.models.checkpoints import build
from support.models.store_making import shard
from support.models.stored_experts import check_same_parameters

Publish = Callable[[Path], Path]


def qwen(**more: int) -> Any:
    """With several groups in each row of an expert, and one MoE layer."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 128}
    return build("qwen3_moe", **sizes | more, num_hidden_layers=1, mlp_only_layers=[])


def awq(path: Path) -> Path:
    return packed.publish_awq(qwen(), path, group=32)


def gptq(bits: int, layout: str = "gptq", shuffled: bool = False) -> Publish:
    return lambda path: packed.publish_gptq(qwen(), path, bits, layout, shuffled, group=32)


def compressed(**weights: Any) -> Publish:
    group = packed.group(**packed.INT4 | {"group_size": 32} | weights)
    return lambda path: packed.publish_compressed(qwen(), path, {"all": group})


INT8 = {"num_bits": 8, "strategy": "channel", "group_size": None, "format": "int-quantized"}
FP8 = packed.FP8 | {"group_size": None}


def gguf(kind: Kind) -> Publish:
    return lambda path: gguf_files.publish(qwen(), path.with_suffix(".gguf"), kind)


def wide_qwen(**more: int) -> Any:
    """With experts that are large beside tables of 256 values."""
    return qwen(**{"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 256, **more})


def gguf_of_k(kind: Kind, down: Kind) -> Publish:
    """A mixture, as llama.cpp's Q4_K_M is one."""
    return lambda path: gguf_files.publish(wide_qwen(), path.with_suffix(".gguf"), kind, down)


def bitsandbytes(kind: str, nested: bool, dtype: str) -> Publish:
    """Rows of 7 blocks, so that scales of 256 blocks end within one; and rows of 4."""
    model = wide_qwen(hidden_size=448)
    return lambda path: packed.publish_bitsandbytes_experts(model, path, kind, nested, dtype)


def compressed_fp4(**weights: Any) -> Publish:
    return lambda path: packed.publish_compressed(wide_qwen(), path, {"all": packed.group(**weights)})


CASES: dict[str, tuple[Publish, str]] = {
    "awq": (awq, "integers of 4 bits"),
    "gptq": (gptq(4), "integers of 4 bits"),
    "gptq-v2-of-8-bits": (gptq(8, "gptq_v2"), "integers of 8 bits"),
    "gptq-of-2-bits": (gptq(2), "integers of 2 bits"),
    "gptq-in-any-order": (gptq(4, shuffled=True), "integers of 4 bits"),
    "compressed-int4": (compressed(), "integers of 4 bits"),
    "compressed-int4-asymmetric": (compressed(symmetric=False), "integers of 4 bits"),
    "compressed-int3": (compressed(num_bits=3), "integers of 3 bits"),
    "compressed-int8": (compressed(**INT8), "integers of 8 bits"),
    "compressed-int8-asymmetric": (compressed(**INT8, symmetric=False), "integers of 8 bits"),
    "compressed-fp8": (compressed(**FP8), "fp8"),
    "compressed-fp8-in-blocks": (compressed(**FP8 | {"strategy": "block", "block_structure": [16, 16]}), "fp8"),
    "compressed-fp8-of-a-matrix": (compressed(**FP8 | {"strategy": "tensor"}), "fp8"),
    **{
        f"gguf-{kind.name}": (gguf(kind), f"ggml integers of {kind.name[1]} bits")
        for kind in (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)
    },
    "gguf-Q4_K-and-Q6_K": (gguf_of_k(Kind.Q4_K, Kind.Q6_K), "ggml integers of 4 and 6 bits"),
    "gguf-Q3_K-and-Q5_K": (gguf_of_k(Kind.Q3_K, Kind.Q5_K), "ggml integers of 3 and 5 bits"),
    "gguf-Q2_K-and-IQ4_NL": (gguf_of_k(Kind.Q2_K, Kind.IQ4_NL), "ggml codebook of 2 and 4 bits"),
    "gguf-IQ4_XS-and-Q6_K": (gguf_of_k(Kind.IQ4_XS, Kind.Q6_K), "ggml codebook of 4 and 6 bits"),
    "gguf-MXFP4": (gguf_of_k(Kind.MXFP4, Kind.MXFP4), "ggml codebook of 4 bits"),
    **{
        f"bitsandbytes-{kind}{'-nested' if nested else ''}": (bitsandbytes(kind, nested, dtype), "codebook of 4 bits")
        for kind, nested, dtype in (
            ("nf4", False, "bfloat16"),
            ("nf4", True, "bfloat16"),
            ("nf4", True, "float16"),
            ("fp4", True, "float32"),
        )
    },
    "bitsandbytes-int8": (bitsandbytes("int8", False, "float16"), "codebook of 8 bits"),
    "compressed-nvfp4": (compressed_fp4(**packed.NVFP4), "codebook of 4 bits"),
    "compressed-mxfp4": (compressed_fp4(**packed.MXFP4), "codebook of 4 bits"),
}
"""How a checkpoint is published, and what its store says."""


class Case:
    def __init__(self, name: str, folder: Path) -> None:
        publish, self.described = CASES[name]
        self.path = publish(folder / "model")
        self.native, self.dequantised = (
            shard(open_source(self.path), folder / how, experts=how) for how in ("native", "dequantised")
        )


FAST = ("gptq-in-any-order", "gguf-Q4_0", "compressed-fp8-in-blocks")


@pytest.fixture(scope="module", params=slow_except(FAST, CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("store"))


def test_restored_experts_are_the_dequantised_ones(case: Case) -> None:
    assert case.native.manifest.described == case.described
    assert case.dequantised.manifest.encoding == ""
    check_same_parameters(case.native, case.dequantised)


def test_a_load_has_the_published_bytes(case: Case) -> None:
    assert kept_bytes(case.native) <= 1.05 * published_bytes(case.path)


def kept_bytes(store: ExpertStore) -> int:
    """Of all tensors of experts, without the gaps between them and to whole pages."""
    sizes = {"uint8": 1, "int8": 1, "int16": 2, "float16": 2, "bfloat16": 2, "float32": 4}
    return sum(
        len(layer.blobs) * torch.Size(tensor.shape).numel() * sizes[tensor.dtype]
        for layer in store.manifest.layers.values()
        for tensor in layer.tensors
    )


def published_bytes(path: Path) -> int:
    held = places(open_source(path))
    return sum(place.nbytes for name, place in held.items() if ".experts." in name or "_exps" in name)


def narrow_bitsandbytes(path: Path) -> Path:
    return packed.publish_bitsandbytes_experts(qwen(moe_intermediate_size=32), path)


def plain_experts(path: Path) -> Path:
    """Transformers quantises all but the experts."""
    return packed.publish_bitsandbytes(qwen(), path, load_in_8bit=True)


@pytest.mark.parametrize(
    ("publish", "because"),
    [
        (
            narrow_bitsandbytes,
            "model.layers.0.mlp.experts: its rows have 32 values, which blocks of 64 do not divide",
        ),
        (plain_experts, "the checkpoint has no quantised experts"),
    ],
)
def test_why_experts_are_dequantised(publish: Publish, because: str, tmp_path: Path) -> None:
    path = publish(tmp_path / "model")
    manifest = shard(open_source(path), tmp_path / "store").manifest
    assert (manifest.encoding, manifest.described, manifest.plain_because) == ("", "", because)
    assert shard(open_source(path), tmp_path / "store", experts="native").manifest == manifest


@pytest.mark.parametrize(
    ("at_once", "words"), [(1 << 25, "matrices with other parts than others"), (1, "gate_up_proj.order.*of the first")]
)
def test_an_expert_that_is_laid_out_otherwise(
    at_once: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a later one has its inputs in any order, which the layout of the first has no place for."""
    monkeypatch.setattr(convert, "_PART_BYTES", at_once)
    path = gptq(4)(tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    for word in ("gate_proj", "up_proj"):
        name = next(name for name in weights if name.endswith(f"experts.3.{word}.g_idx"))
        weights[name] = weights[name].flip(0)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptCheckpointError, match=f"{words}.*--experts dequantised"):
        shard(open_source(path), tmp_path / "store")
    assert shard(open_source(path), tmp_path / "dequantised", experts="dequantised").manifest.encoding == ""
