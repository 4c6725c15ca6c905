"""Mixtral-offloading's next gate: by hand and against counting."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from scheduler.policies.baselines.mixtral_offloading import NextGate
from scheduler.policies.predictors.base import Forecast, Scores
from scheduler.types import ModelShape
from support.scheduling.forecasts import NEXT, ROW, SHAPE, best, forecast_of

TABLE = st.integers(4, 12).flatmap(
    lambda e: st.lists(
        st.lists(st.integers(0, 99), min_size=e, max_size=e, unique=True).map(tuple), min_size=1, max_size=5
    ).map(tuple)
)


def test_the_next_gate_brings_its_top_k_in_the_order_of_scores() -> None:
    assert forecast_of(NextGate(SHAPE), (ROW,), {4}) == Forecast(NEXT, (1, 4))
    assert forecast_of(NextGate(SHAPE, prefetch=1), (ROW,)) == Forecast(NEXT, (1, 4), (1,))
    assert forecast_of(NextGate(SHAPE, prefetch=3), (ROW,)) == Forecast(NEXT, (1, 4), (1, 4, 7))
    assert not list(NextGate(SHAPE).on_foreseen(NEXT, (ROW,), (), True))
    assert not list(NextGate(SHAPE).on_foreseen(NEXT, (), (), False))


@given(TABLE, st.integers(1, 4))
def test_of_several_rows_what_most_want_comes_first(scores: Scores, k: int) -> None:
    experts = forecast_of(NextGate(ModelShape((0, 1), len(scores[0]), k)), scores).experts
    count = Counter(e for row in scores for e in best(row, k))
    assert set(experts) == set(count)
    weigh = [(count[e], sum(row[e] for row in scores)) for e in experts]
    assert weigh == sorted(weigh, reverse=True)
