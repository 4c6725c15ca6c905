"""Products with weights [in, out] against torch's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from checkpoint import float_tiles, inputs_first
from checkpoint.kernels import EXACT, FAST

SHAPE = 321, 1031
"""So that neither sums nor strips come out even."""


@pytest.fixture(params=[torch.float32, torch.bfloat16], autouse=True)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    """Transformers sets it for the whole process while a model is built."""
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


def cancelling(count: int, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and a weight whose products are the rounding error of the order alone."""
    random = torch.Generator().manual_seed(count)
    rows, weight = torch.randn(count, shape[0], generator=random), torch.randn(shape, generator=random)
    half = shape[0] // 2
    rows[:, half : 2 * half], weight[half : 2 * half] = rows[:, :half], -weight[:half]
    return rows.bfloat16(), weight.bfloat16()


@pytest.mark.skipif(not float_tiles.is_faster(), reason="oneDNN multiplies bfloat16 here, in an order of its own")
@pytest.mark.parametrize("count", [1, 2, 5, 33])
@pytest.mark.parametrize("threads", [1, 2])
def test_exact_products_have_the_bits_of_torch(count: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs_first, "_THREAD_BYTES", 1 << 10)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows, weight = cancelling(count, SHAPE)
        assert inputs_first.has_products(weight)
        assert torch.equal(inputs_first.multiply(rows, weight), rows @ weight)
        rows[0, 7] = float("inf")
        weight[9] = 3e38
        rows[-1, 9] = 3e38
        assert torch.equal(EXACT.bind_inputs_first(weight)(rows).nan_to_num(5), (rows @ weight).nan_to_num(5))
    finally:
        torch.set_num_threads(before)


def test_another_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs_first, "_equal", {})
    monkeypatch.setattr(inputs_first, "multiply", lambda rows, weight: (rows.double() @ weight.double()).bfloat16())
    assert not inputs_first.has_products(torch.empty(SHAPE, dtype=torch.bfloat16))


def test_tiles_are_products_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float_tiles, "is_faster", lambda: True)
    monkeypatch.setattr(float_tiles, "_TILE_BYTES", 1 << 15)
    random = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(300, 256, generator=random).bfloat16(), torch.randn(300, generator=random).bfloat16()
    for count in (1, 3, 4, 50):
        rows = torch.randn(count, 256, generator=random).bfloat16()
        expected = rows.double() @ weight.double().t()
        for found, wanted in (
            (FAST(rows.view(1, count, 256), weight)[0], expected),
            (FAST(rows, weight, bias), expected + bias),
            (FAST.bind_inputs_first(weight.t().contiguous())(rows), expected),
        ):
            torch.testing.assert_close(found.double(), wanted.double(), rtol=2**-7, atol=2**-7)
