"""What an expert's computation takes: for each call, and for each of its rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

ROWS = 16
ROUNDS = 5
SECONDS = 0.3
"""None is begun after so many, once each has been measured."""


def computing_costs(
    experts: Sequence[Callable[[int], object]], clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """(seconds a call, seconds a row of it): each of `experts` is called with a number of rows and computes them.

    Each is called once before, so that its bytes are there; then in turn, so that none stays in a cache that its
    successors overflow; medians of a few rounds with one row and with `ROWS`.
    """
    for compute in experts:
        compute(1)
    one, many, began = [], [], clock()
    for _ in range(ROUNDS):
        for compute in experts:
            one.append(_seconds(compute, 1, clock))
            many.append(_seconds(compute, ROWS, clock))
            if clock() - began >= SECONDS:
                return _line(statistics.median(one), statistics.median(many))
    return _line(statistics.median(one), statistics.median(many))


def _seconds(compute: Callable[[int], object], rows: int, clock: Callable[[], float]) -> float:
    began = clock()
    compute(rows)
    return clock() - began


def _line(one: float, many: float) -> tuple[float, float]:
    """Through both; where more rows take no longer, all of it is the call."""
    row = max(0.0, (many - one) / (ROWS - 1))
    return max(0.0, one - row), row
