"""Products with encoded weights against torch's products with the weights that Transformers makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from checkpoint.native import products
from checkpoint.native.encoding import CODES, SCALES
from checkpoint.native.mxfp4 import Mxfp4
from checkpoint.native.products import OutOfRangeError, is_equal, multiply

needs_order = pytest.mark.skipif(
    not products.are_possible(Mxfp4(), torch.bfloat16, "cpu"), reason="torch adds in an order that is not known"
)
SHAPES = [(64, 192), (96, 128), (320, 160), (512, 34), (1024, 1536)]


def scratch(threads: int = 1) -> torch.Tensor:
    return torch.empty(Mxfp4().scratch_for(SHAPES, "cpu", threads), dtype=torch.uint8)


def published(shape: tuple[int, int], seed: int, least: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers [1, out, in / 32, 16] and scales [1, out, in / 32]."""
    random = torch.Generator().manual_seed(seed)
    rows, columns = shape
    numbers = torch.randint(0, 256, (1, columns, rows // 32, 16), dtype=torch.uint8, generator=random)
    return numbers, torch.randint(least, most + 1, numbers.shape[:3], dtype=torch.uint8, generator=random)


def encoded(numbers: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of the only weight."""
    parts = Mxfp4().encode({CODES: numbers, SCALES: scales})
    return parts[CODES][0], parts[SCALES][0]


def row_of(count: int, seed: int, spread: int, zeros: float) -> torch.Tensor:
    """Random numbers over `spread` powers of two to both sides, some of them zero, of both signs."""
    random = torch.Generator().manual_seed(seed)
    powers = torch.randint(-spread, spread + 1, (1, count), generator=random).exp2()
    row = torch.randn(1, count, generator=random) * powers
    return (row * (torch.rand(1, count, generator=random) >= zeros)).to(torch.bfloat16)


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.view(torch.int16)


@needs_order
@pytest.mark.parametrize("threads", [1, 2])
@given(
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 1 << 30),
    scales=st.tuples(st.integers(67, 187), st.integers(0, 20)),
    spread=st.integers(0, 20),
    zeros=st.sampled_from([0.0, 0.5, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_products_have_the_bits_of_those_with_restored_weights(
    threads: int, shape: tuple[int, int], seed: int, scales: tuple[int, int], spread: int, zeros: float
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert is_equal(shape, scratch(threads))
        numbers, grid = published(shape, seed, scales[0], min(sum(scales), 187))
        weight = convert_moe_packed_tensors(numbers, grid)[0]
        codes, held = encoded(numbers, grid)
        row = row_of(shape[0], seed, spread, zeros)
        assert torch.equal(bits(multiply(row, codes, held, scratch(threads))), bits(row @ weight))
    finally:
        torch.set_num_threads(before)


@needs_order
def test_a_real_expert_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes of openai/gpt-oss-20b."""
    monkeypatch.setattr(products, "_equal", {})
    shapes = [(2880, 5760), (2880, 2880)]
    memory = torch.empty(Mxfp4().scratch_for(shapes, "cpu", 1), dtype=torch.uint8)
    assert all(is_equal(shape, memory) for shape in shapes)


@pytest.mark.parametrize("value", [2.0**-41, 2.0**41, -(2.0**-120), float("inf"), float("nan")])
def test_a_row_that_is_out_of_range(value: float) -> None:
    codes, scales = encoded(*published((64, 34), 0, 110, 120))
    row = torch.ones(1, 64, dtype=torch.bfloat16)
    multiply(row, codes, scales, scratch())
    row[0, 5] = value
    with pytest.raises(OutOfRangeError):
        multiply(row, codes, scales, scratch())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_row_in_another_dtype(dtype: torch.dtype) -> None:
    """Its bits would be taken for those of bfloat16."""
    codes, scales = encoded(*published((64, 34), 0, 110, 120))
    row = torch.full((1, 64), 0.03125, dtype=dtype)
    with pytest.raises(OutOfRangeError):
        multiply(row, codes, scales, scratch())


def test_scratch_memory_that_is_too_short() -> None:
    codes, scales = encoded(*published((64, 34), 0, 110, 120))
    row = torch.ones(1, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="scratch memory"):
        multiply(row, codes, scales, scratch()[:, :64])


def test_rows_are_restored_where_numba_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(products, "_equal", {})
    monkeypatch.setattr(products, "multiply", fail)
    assert not is_equal((64, 192), scratch())
    assert not is_equal((64, 192), scratch())
    assert caplog.text.count("no space left on device") == 1


@pytest.mark.parametrize("scale", [0, 66, 188, 254])
def test_a_scale_that_is_out_of_range(scale: int) -> None:
    codes, scales = encoded(*published((64, 34), 0, 67, 187))
    row = torch.ones(1, 64, dtype=torch.bfloat16)
    multiply(row, codes, scales, scratch())
    scales[1, 33] = scale
    with pytest.raises(OutOfRangeError):
        multiply(row, codes, scales, scratch())


def test_another_order_of_summation_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact sums, rounded once, are what another order of rounding comes nearest to."""

    def exact(row: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, *_: Any) -> torch.Tensor:
        weight = torch.empty(row.shape[1], scales.shape[1], dtype=torch.bfloat16)
        piece = weight.numel()
        rest = torch.empty(Mxfp4().scratch_bytes(tuple(weight.shape), piece), dtype=torch.uint8)
        Mxfp4().restore(weight, {CODES: codes, SCALES: scales}, rest, piece)
        return (row.double() @ weight.double()).to(torch.bfloat16)

    monkeypatch.setattr(products, "_equal", {})
    monkeypatch.setattr(products, "multiply", exact)
    assert not is_equal((512, 256), scratch())
    assert not is_equal((2880, 2880), scratch())
