"""Rows of several passes through one expert: shared computations have the bits of each pass by itself."""

from __future__ import annotations

from threading import Event, Thread

import pytest
import torch

from checkpoint.expert import Compute
from checkpoint.joint_rows import MOST_ROWS, PROBE_ROWS, JointRows, by_pass, most_rows

HIDDEN = 64
PASSES = [number for number, count in enumerate((1, 30, 128, 2, 128, 5)) for _ in range(count)]
SHUFFLED = [PASSES[at] for at in torch.randperm(len(PASSES), generator=torch.Generator().manual_seed(3)).tolist()]

CALLS = len(PROBE_ROWS)
"""Until all is compared."""
REPEATS = 8
"""With as many random rows as `HIDDEN` needs."""


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
    for _ in range(CALLS):
        counts.clear()
        output = joint.compute("kind", run, hidden, weights, SHUFFLED)
        assert torch.equal(output, each_alone(run, hidden, weights))
    assert max(counts) <= MOST_ROWS


def test_few_rows_stay_by_themselves() -> None:
    """Products of one or two rows have bits of their own here."""
    hidden, weights, _ = given(torch.float32)
    run, counts = counted(lambda rows, shares: rows * shares.unsqueeze(1) + (len(rows) < 3) * 1e-3)
    joint = JointRows()
    for _ in range(CALLS):
        counts.clear()
        joint.compute("kind", run, hidden, weights, SHUFFLED)
        assert sum(counts) <= len(SHUFFLED) + REPEATS * 2 * MOST_ROWS, "a call compares two numbers of rows"
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
        for _ in range(3):
            joint.compute("kind", compute, hidden, weights, SHUFFLED)
        seen.clear()
        output = joint.compute("kind", compute, hidden, weights, SHUFFLED)
        assert sorted(seen) == [1, 2, 5, 30, 128, 128], "nothing is compared any more"
        assert torch.equal(output, by_pass(compute, hidden, weights, SHUFFLED))


def test_nobody_waits_for_a_comparison() -> None:
    """The one that compares may be slow, or wait for what the other holds."""
    hidden, weights, matrix = given(torch.float32)
    joint, begun, ended = JointRows(), Event(), Event()

    def slow(rows: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        begun.set()
        assert ended.wait(60)
        return rows @ matrix

    other = Thread(target=joint.compute, args=("kind", slow, hidden, weights, SHUFFLED))
    other.start()
    try:
        assert begun.wait(60)
        run, counts = counted(lambda rows, shares: rows @ matrix)
        joint.compute("kind", run, hidden, weights, SHUFFLED)
        assert sorted(counts) == [1, 2, 5, 30, 128, 128]
    finally:
        ended.set()
        other.join(60)


def test_large_experts_share_fewer_rows() -> None:
    """A comparison of 256 rows with an expert of Mixtral's would take seconds."""
    assert [most_rows(weights) for weights in (3 * 768 * 2048, 3 * 14336 * 4096, 1 << 40)] == [256, 48, 32]
