"""The cost of an expert's computation: seconds a call, and seconds a row."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

ROWS = 16
ROUNDS = 5
SECONDS = 0.3
"""No measurement begins after so many seconds, once each expert has been measured."""


def computing_costs(
    experts: Sequence[Callable[[int], object]], clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """(seconds a call, seconds a row): each of `experts` takes a number of rows and computes them.

    Each is called once beforehand, so that its bytes are in memory. Then they are called in turn, so that none stays in
    a cache that the others overflow. Medians of `ROUNDS` rounds, with one row and with `ROWS`.
    """
    for compute in experts:
        compute(1)
    one, many, start = [], [], clock()
    for _ in range(ROUNDS):
        for compute in experts:
            one.append(_seconds(compute, 1, clock))
            many.append(_seconds(compute, ROWS, clock))
            if clock() - start >= SECONDS:
                return _line(statistics.median(one), statistics.median(many))
    return _line(statistics.median(one), statistics.median(many))


def _seconds(compute: Callable[[int], object], rows: int, clock: Callable[[], float]) -> float:
    start = clock()
    compute(rows)
    return clock() - start


def _line(one: float, many: float) -> tuple[float, float]:
    """The line through both. Where more rows take no longer, all of the time is the call's."""
    row = max(0.0, (many - one) / (ROWS - 1))
    return max(0.0, one - row), row
