"""Medians and their intervals, beside a printed table and many drawn samples."""

from __future__ import annotations

import random

import pytest

from scripts.lib.timing.intervals import Interval

TABLE = {5: 1, 6: 1, 8: 1, 9: 2, 11: 2, 12: 3, 15: 4, 17: 5, 20: 6, 25: 8, 30: 10}
"""n -> r of the interval from the r-th smallest to the r-th largest value that holds the median with at least 95 %,
as in printed tables of the sign test; n = 5 has none and takes r = 1."""


@pytest.mark.parametrize(("count", "rank"), TABLE.items())
def test_the_order_statistics_of_the_table(count: int, rank: int) -> None:
    found = Interval.of(float(number) for number in range(1, count + 1))
    assert (found.low, found.high) == (rank, count + 1 - rank)
    assert found.median == (count + 1) / 2
    assert found.count == count


@pytest.mark.parametrize("count", [6, 9, 20])
def test_it_holds_the_true_median_as_often_as_it_says(count: int) -> None:
    draw = random.Random(count)
    samples = [Interval.of(draw.expovariate(1.0) for _ in range(count)) for _ in range(4000)]
    held = sum(one.low <= 0.6931 <= one.high for one in samples) / len(samples)
    assert 0.94 < held < 0.985


def test_digits_are_those_that_mean_something() -> None:
    assert str(Interval(0.563, 0.531, 0.612, 6)) == "0.56 (0.53 to 0.61)"
    assert str(Interval(0.563, 0.431, 0.712, 6)) == "0.6 (0.4 to 0.7)"


def test_one_value_and_none() -> None:
    assert Interval.of([2.0]) == Interval(2.0, 2.0, 2.0, 1)
    with pytest.raises(ValueError, match="no values"):
        Interval.of([])


def test_over_runs_each_runs_median_is_within() -> None:
    """One hour's values lie apart from the next hour's: all of them as if of one run would leave both medians out."""
    hours = [[0.60 + n / 1000 for n in range(12)], [0.90 + n / 1000 for n in range(12)]]
    over = Interval.over_runs(hours)
    assert (over.median, over.count) == (pytest.approx(0.7555), 24)
    assert all(Interval.of(hour).median in over for hour in hours)
    assert over.low == Interval.of(hours[0]).low
    assert over.high == Interval.of(hours[1]).high
    assert 0.59 not in over
    assert 0.95 not in over
    with pytest.raises(ValueError, match="no runs"):
        Interval.over_runs([])
