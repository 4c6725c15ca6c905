"""Medians with an interval, and how many digits of them mean something."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

COVERAGE = 0.95
COARSE = 0.05
"""Half an interval that is wider than this leaves one digit behind the point."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The median of n values, and bounds of the true median by order statistics: whatever the distribution, they hold
    it with a probability of at least `COVERAGE` from six values on (with five: 0.94, their smallest and largest)."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Interval:
        """Raises ValueError without values."""
        found = sorted(values)
        if not found:
            raise ValueError("there is no median of no values")
        at = _rank(len(found))
        return cls(statistics.median(found), found[at], found[-1 - at], len(found))

    @classmethod
    def over_runs(cls, runs: Iterable[Iterable[float]]) -> Interval:
        """Of several runs of the same: the median of all their values, and bounds from the lowest to the highest of the
        runs' own. How fast a machine is changes from hour to hour; values of one hour do not show that, and those of
        two, taken as if they were of one, hide it. Raises ValueError without runs."""
        values = [list(run) for run in runs]
        if not values:
            raise ValueError("there is no interval over no runs")
        found = [cls.of(run) for run in values]
        every = [value for run in values for value in run]
        low, high = min(one.low for one in found), max(one.high for one in found)
        return cls(statistics.median(every), low, high, len(every))

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    @property
    def digits(self) -> int:
        """Behind the point."""
        return 1 if (self.high - self.low) / 2 > COARSE else 2

    def __str__(self) -> str:
        return f"{self.median:.{self.digits}f} ({self.low:.{self.digits}f} to {self.high:.{self.digits}f})"


def _rank(count: int) -> int:
    """How many values at each end lie outside the interval. The number of values below the median is binomial."""
    below, rank = 0.0, 0
    for number in range((count - 1) // 2):
        below += math.comb(count, number) / 2**count
        if 1 - 2 * below < COVERAGE:
            break
        rank = number
    return rank
