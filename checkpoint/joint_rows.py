"""Rows of several passes through one expert: each pass's by themselves, or several passes' as one computation.

A product of more rows may sum in another order, so that a row's bits would depend on the rows beside it. On most
processors they do not once there are a few rows. That is found out by comparison, once for each kind of expert.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

import torch

from checkpoint.expert import Compute

MOST_ROWS = 256
"""Most rows of a computation that passes share. More would be hardly faster, and take longer to compare."""
PROBE_ROWS = (129, 96, 65, 48, 33, 31, 17, 16, 13, 9, 8, 7, 6, 5, 4, 3, 2, 1)
"""Numbers of rows that stand for all: whole tiles of a kernel, and one row more or less."""
LEAST_ROWS = 4
"""Passes share nothing if a computation of so many rows has other bits than one of more."""
_TRIES = 3
"""So many experts that cannot tell, and passes share nothing."""
_WORK = 1 << 33
"""Most products of a weight and a row in a shared computation: with more the comparison could take seconds."""
_OUTPUTS = 1 << 17
"""Numbers compared, at least: of random ones, one in 10,000 shows another order of summation."""


def most_rows(weights: int) -> int:
    """Of a computation that passes share, for an expert of so many weights: at least 32."""
    return min(max(_WORK // weights, 32), MOST_ROWS)


class JointRows:
    """Which passes can share a computation, by kind of expert. Thread-safe."""

    def __init__(self) -> None:
        self._comparisons: dict[Hashable, _Comparison] = {}
        self._lock = threading.Lock()

    def compute(
        self,
        kind: Hashable,
        run: Compute,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        passes: Sequence[int],
        most: int = MOST_ROWS,
    ) -> torch.Tensor:
        """As `by_pass`, with as few computations as keep all bits. `kind`: the same for experts that `run` computes in
        the same way. The first calls for a kind compute random rows with the expert that is there."""
        kind = kind, most, hidden.dtype, weights.dtype, torch.get_num_threads()
        with self._lock:
            comparison = self._comparisons.setdefault(kind, _Comparison(most))
        return by_pass(run, hidden, weights, passes, comparison.least(run, hidden, weights), most)


JOINT = JointRows()
"""One for the process: what one worker finds holds for all."""


class _Comparison:
    """From how many rows on a row's bits do not depend on the number of rows beside it.

    Each call compares one number of rows with the next larger one: all at once could take longer than an answer may.
    """

    def __init__(self, most: int) -> None:
        self._counts = [most, *(count for count in PROBE_ROWS if count < most)]
        """The first is the least with the bits of `most`, so far."""
        self._tries = _TRIES
        self._least: int | None = None
        self._step = threading.Lock()

    def least(self, run: Compute, hidden: torch.Tensor, weights: torch.Tensor) -> int:
        """0: none is known, or there is none."""
        if self._least is None and self._step.acquire(blocking=False):  # nobody waits for another's computation
            try:
                if self._least is None:
                    self._compare(run, hidden, weights)
            finally:
                self._step.release()
        return self._least or 0

    def _compare(self, run: Compute, hidden: torch.Tensor, weights: torch.Tensor) -> None:
        count = self._counts[0]
        same = _have_same_bits(run, count, self._counts[1], hidden, weights)
        if same is None:
            self._tries -= 1
            self._least = None if self._tries else 0
        elif not same:
            self._least = count if count <= LEAST_ROWS else 0
        else:
            del self._counts[0]
            self._least = self._counts[0] if len(self._counts) == 1 else None


def by_pass(
    compute: Compute,
    hidden: torch.Tensor,
    weights: torch.Tensor,
    passes: Sequence[int],
    least: int = 0,
    most: int = MOST_ROWS,
) -> torch.Tensor:
    """`hidden` [n, H] and `weights` [n] through an expert: [n, H]. `passes`: of each row, see `wire.messages.Compute`.
    `least`: passes of so many rows share computations of up to `most`; 0: none does.

    Rows of a computation are copied: the last bit of a float32 product depends on whether their address is aligned.
    """
    counts = Counter(passes)
    if len(counts) < 2 or (least and len(passes) <= most and min(counts.values()) >= least):
        return compute(hidden, weights)
    rows: dict[int, list[int]] = {number: [] for number in counts}
    for row, number in enumerate(passes):
        rows[number].append(row)
    groups = _groups(rows.values(), least, most) if least else list(rows.values())
    order = torch.tensor(list(itertools.chain.from_iterable(groups)), device=hidden.device)
    hidden, weights = hidden[order].split(sizes := [len(some) for some in groups]), weights[order].split(sizes)
    output = torch.cat([compute(*some) for some in zip(hidden, weights, strict=True)])
    return torch.empty_like(output).index_copy_(0, order, output)


def _groups(parts: Iterable[list[int]], least: int, most: int) -> list[list[int]]:
    """Rows that are computed at once. Those of a pass stay together."""
    groups: list[list[int]] = []
    joined: list[int] = []
    for rows in parts:
        if len(rows) < least:
            groups.append(rows)
        elif len(joined) + len(rows) <= most:
            joined = joined + rows
        else:
            groups += [joined] if joined else []
            joined = rows
    return [*groups, joined] if joined else groups


def _have_same_bits(run: Compute, count: int, fewer: int, hidden: torch.Tensor, weights: torch.Tensor) -> bool | None:
    """Whether rows have the same bits among `count` and among `fewer`. None: the expert that is there cannot tell."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(-(-_OUTPUTS // (count * hidden.shape[1]))):
        rows = torch.randn(count, hidden.shape[1], generator=generator).to(hidden)
        shares = torch.rand(count, generator=generator).to(weights)
        whole = run(rows, shares)
        if not bool(whole.isfinite().all() and whole.any(dim=1).all()):
            return None
        # At the end, so that they lie elsewhere in a kernel's tiles.
        if not torch.equal(run(rows[-fewer:].clone(), shares[-fewer:].clone()), whole[-fewer:]):
            return False
    return True
