"""Weights that AutoAWQ and AutoGPTQ packed themselves: restored to the numbers that those packages restore."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from checkpoint.formats import awq, gptq
from support.paths import ROOT

WEIGHTS = load_file(ROOT / "tests/data/formats/packed_by_tools.safetensors")
"""Matrices of 32 outputs and 64 inputs in groups of 16, with the float16 that the package makes of each (`weight`).

`awq`: packed by `WQLinear_GEMM.from_linear` of autoawq 0.2.9, restored by its `dequantize_gemm`. `gptq2`, `gptq4`,
`gptq8`: packed by `QuantLinear.pack` of `qlinear_cuda` in auto-gptq 0.7.1, with inputs in another order than their
groups, as `desc_act` leaves them, and restored by its product with the unit matrix.
"""


def parts(name: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(f"{name}."): value for key, value in WEIGHTS.items() if key.startswith(f"{name}.")}


def test_autoawq() -> None:
    packed = parts("awq")
    expected = packed.pop("weight")
    assert torch.equal(awq.restored(**packed), expected)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_autogptq(bits: int) -> None:
    packed = parts(f"gptq{bits}")
    expected = packed.pop("weight")
    assert not torch.equal(packed["g_idx"], packed["g_idx"].sort().values), "the order of the inputs shows nothing"
    assert torch.equal(gptq.restored(**packed, added=1), expected)
