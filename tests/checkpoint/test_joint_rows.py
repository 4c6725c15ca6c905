"""Rows of several passes through one expert: shared computations have the bits of each pass by itself."""

from __future__ import annotations

import pytest
import torch

from checkpoint.expert import Compute
from checkpoint.joint_rows import MOST_ROWS, JointRows, by_pass

HIDDEN = 64
PASSES = [number for number, count in enumerate((1, 30, 128, 2, 128, 5)) for _ in range(count)]
SHUFFLED = [PASSES[at] for at in torch.randperm(len(PASSES), generator=torch.Generator().manual_seed(3)).tolist()]


def given(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of `SHUFFLED`, their weights, and a matrix."""
    generator = torch.Generator().manual_seed(1)
    rows, matrix = (torch.randn(n, HIDDEN, generator=generator) for n in (len(SHUFFLED), HIDDEN))
    return rows.to(dtype), torch.rand(len(SHUFFLED), generator=generator).to(dtype), matrix.to(dtype)


def counted(compute: Compute) -> tuple[Compute, list[int]]:
    counts: list[int] = []

    def run(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        counts.append(len(hidden))
        return compute(hidden, weights)

    return run, counts


def each_alone(compute: Compute, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    output = torch.empty_like(hidden)
    for number in set(SHUFFLED):
        rows = [row for row, other in enumerate(SHUFFLED) if other == number]
        output[rows] = compute(hidden[rows], weights[rows])
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_computations_have_each_passs_bits(dtype: torch.dtype) -> None:
    hidden, weights, matrix = given(dtype)
    run, counts = counted(lambda rows, shares: (rows @ matrix) * shares.unsqueeze(1))
    joint = JointRows()
    for _ in range(2):
        counts.clear()
        output = joint.compute("kind", run, hidden, weights, SHUFFLED)
        assert torch.equal(output, each_alone(run, hidden, weights))
    assert max(counts) <= MOST_ROWS


def test_few_rows_stay_by_themselves() -> None:
    """Products of one or two rows have bits of their own here."""
    hidden, weights, _ = given(torch.float32)
    run, counts = counted(lambda rows, shares: rows * shares.unsqueeze(1) + (len(rows) < 3) * 1e-3)
    joint = JointRows()
    joint.compute("kind", run, hidden, weights, SHUFFLED)
    counts.clear()
    output = joint.compute("kind", run, hidden, weights, SHUFFLED)
    assert sorted(counts)[:2] == [1, 2]
    assert len(counts) == 4
    assert torch.equal(output, each_alone(run, hidden, weights))


def test_none_is_shared_if_bits_differ_or_cannot_be_told() -> None:
    hidden, weights, _ = given(torch.float32)
    run, counts = counted(lambda rows, shares: rows * shares.unsqueeze(1) + (len(rows) < 200) * 1e-3)
    zeros, zero_counts = counted(lambda rows, shares: torch.zeros_like(rows))
    for compute, seen in ((run, counts), (zeros, zero_counts)):
        joint = JointRows()
        joint.compute("kind", compute, hidden, weights, SHUFFLED)
        seen.clear()
        output = joint.compute("kind", compute, hidden, weights, SHUFFLED)
        assert {1, 2, 5, 30, 128} <= set(seen)
        assert torch.equal(output, by_pass(compute, hidden, weights, SHUFFLED))
