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
_OUTPUTS = 1 << 17
"""Numbers compared, at least: of random ones, one in 10,000 shows another order of summation."""


class JointRows:
    """Which passes can share a computation, by kind of expert. Thread-safe."""

    def __init__(self) -> None:
        self._least: dict[Hashable, int] = {}
        self._lock = threading.Lock()

    def compute(
        self, kind: Hashable, run: Compute, hidden: torch.Tensor, weights: torch.Tensor, passes: Sequence[int]
    ) -> torch.Tensor:
        """As `by_pass`, with as few computations as keep all bits. `kind`: the same for experts that `run` computes in
        the same way. The first call for a kind computes random rows with the expert that is there."""
        kind = kind, hidden.dtype, weights.dtype, torch.get_num_threads()
        with self._lock:
            if kind not in self._least and (least := _least_rows(run, hidden, weights)) is not None:
                self._least[kind] = least
        return by_pass(run, hidden, weights, passes, self._least.get(kind, 0))


JOINT = JointRows()
"""One for the process: what one worker finds holds for all."""


def by_pass(
    compute: Compute, hidden: torch.Tensor, weights: torch.Tensor, passes: Sequence[int], least: int = 0
) -> torch.Tensor:
    """`hidden` [n, H] and `weights` [n] through an expert: [n, H]. `passes`: of each row, see `wire.messages.Compute`.
    `least`: passes of so many rows share computations of up to `MOST_ROWS`; 0: none does.

    Rows of a computation are copied: the last bit of a float32 product depends on whether their address is aligned.
    """
    counts = Counter(passes)
    if len(counts) < 2 or (least and len(passes) <= MOST_ROWS and min(counts.values()) >= least):
        return compute(hidden, weights)
    rows: dict[int, list[int]] = {number: [] for number in counts}
    for row, number in enumerate(passes):
        rows[number].append(row)
    groups = _groups(rows.values(), least) if least else list(rows.values())
    order = torch.tensor(list(itertools.chain.from_iterable(groups)), device=hidden.device)
    hidden, weights = hidden[order].split(sizes := [len(some) for some in groups]), weights[order].split(sizes)
    output = torch.cat([compute(*some) for some in zip(hidden, weights, strict=True)])
    return torch.empty_like(output).index_copy_(0, order, output)


def _groups(parts: Iterable[list[int]], least: int) -> list[list[int]]:
    """Rows that are computed at once. Those of a pass stay together."""
    groups: list[list[int]] = []
    joined: list[int] = []
    for rows in parts:
        if len(rows) < least:
            groups.append(rows)
        elif len(joined) + len(rows) <= MOST_ROWS:
            joined = joined + rows
        else:
            groups += [joined] if joined else []
            joined = rows
    return [*groups, joined] if joined else groups


def _least_rows(run: Compute, hidden: torch.Tensor, weights: torch.Tensor) -> int | None:
    """From how many rows on a row's bits do not depend on the number of rows beside it; 0: from none. None: the expert
    that is there cannot tell."""
    generator = torch.Generator().manual_seed(0)
    least = 1
    for _ in range(-(-_OUTPUTS // (MOST_ROWS * hidden.shape[1]))):
        rows = torch.randn(MOST_ROWS, hidden.shape[1], generator=generator).to(hidden)
        shares = torch.rand(MOST_ROWS, generator=generator).to(weights)
        whole = run(rows, shares)
        if not bool(whole.isfinite().all() and whole.any(dim=1).all()):
            return None
        for count in PROBE_ROWS:  # at the end, so that they lie elsewhere in a kernel's tiles
            if count >= least and not torch.equal(run(rows[-count:].clone(), shares[-count:].clone()), whole[-count:]):
                least = count + 1
                break
    return least if least <= LEAST_ROWS else 0
