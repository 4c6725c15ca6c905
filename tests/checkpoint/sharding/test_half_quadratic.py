"""HQQ in pieces, beside HQQ's own quantiser: every bit of the numbers, scales and zeros."""

from __future__ import annotations

import pytest
import torch
from hqq.core.quantize import Quantizer
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.sharding import half_quadratic
from checkpoint.sharding.half_quadratic import quantised


def by_hqq(groups: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    numbers, meta = Quantizer.quantize(
        groups.float(), nbits=bits, group_size=groups.shape[1], axis=1, bitpack=False, device="cpu"
    )
    return numbers.to(torch.uint8), meta["scale"], meta["zero"]


def same_bits(groups: torch.Tensor, bits: int) -> bool:
    found, expected = quantised(groups, bits), by_hqq(groups, bits)
    return torch.equal(found[0], expected[0]) and all(
        torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
        for ours, theirs in zip(found[1:], expected[1:], strict=True)
    )


@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 100),
    group=st.sampled_from([64, 128]),
    bits=st.sampled_from([4, 2]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    spread=st.sampled_from([1e-6, 1e-4, 0.02, 0.3, 1.0, 50.0]),
    outliers=st.sampled_from([0.0, 0.01, 0.5]),
    shift=st.sampled_from([0.0, 0.01, 3.0]),
    piece=st.sampled_from([1, 7, 64, 2048]),
    seed=st.integers(0, 1 << 20),
)
def test_every_bit_is_hqqs(
    rows: int,
    group: int,
    bits: int,
    dtype: torch.dtype,
    spread: float,
    outliers: float,
    shift: float,
    piece: int,
    seed: int,
) -> None:
    random = torch.Generator().manual_seed(seed)
    groups = torch.randn(rows, group, generator=random) * spread + shift
    groups[torch.rand(rows, group, generator=random) < outliers] *= 30
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(half_quadratic, "PIECE", piece)
        assert same_bits(groups.to(dtype), bits)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("spread", [0.02, 1.0])
def test_a_weight_of_a_real_size(bits: int, spread: float) -> None:
    """Many pieces, nearly all iterations, and groups that stand still long before the last."""
    groups = torch.randn(12_000, 64, generator=torch.Generator().manual_seed(4)) * spread
    assert same_bits(groups.bfloat16(), bits)


@pytest.mark.parametrize("bits", [4, 2])
def test_groups_that_do_not_vary(bits: int) -> None:
    zeros = torch.zeros(8, 64)
    zeros[2:5, ::3] = -0.0
    zeros[5:] = -0.0
    for groups in (zeros, torch.full((8, 64), 0.37), torch.cat((zeros, torch.randn(8, 64), torch.full((3, 64), -2.0)))):
        assert same_bits(groups, bits)


@pytest.mark.parametrize("bits", [4, 2])
def test_where_no_error_shrinks_at_the_bound(bits: int) -> None:
    """Errors on both sides of the size below which the shrinkage is left out."""
    steps = torch.linspace(0.1, 1.0, 200)[:, None] * torch.linspace(-1, 1, 64) ** 3
    assert same_bits(steps, bits)


def test_an_error_below_the_bound_shrinks_to_zero() -> None:
    errors = torch.linspace(-half_quadratic.UNSHRUNK, half_quadratic.UNSHRUNK, 100_001)
    assert not half_quadratic._shrunk(errors).any()
    assert half_quadratic._shrunk(torch.tensor([0.18, -0.18])).sign().tolist() == [1.0, -1.0]
