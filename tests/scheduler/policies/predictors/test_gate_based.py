"""The cross-layer gate and the next layer: by hand, against statistics.quantiles, and against counting."""

from __future__ import annotations

from collections import Counter
from statistics import quantiles

from hypothesis import given
from hypothesis import strategies as st

from scheduler.policies.predictors.base import Forecast, Scores
from scheduler.policies.predictors.gate_based import CrossLayer, NextLayer
from scheduler.types import ModelShape
from support.scheduling.forecasts import NEXT, ROW, SHAPE, best, forecast_of

TABLE = st.integers(4, 12).flatmap(
    lambda e: st.lists(
        st.lists(st.integers(0, 99), min_size=e, max_size=e, unique=True).map(tuple), min_size=1, max_size=5
    ).map(tuple)
)


def test_what_each_needs_computed() -> None:
    assert [p.foresight for p in (CrossLayer(SHAPE), NextLayer(SHAPE))] == ["gate", "attention"]


@given(TABLE, st.integers(1, 4))
def test_cross_layer_expects_what_is_over_the_75th_percentile_and_the_top_k(scores: Scores, k: int) -> None:
    """quantiles(..., "inclusive") cuts where numpy's percentile does."""
    fate = CrossLayer(ModelShape((0, 1), len(scores[0]), k))
    over = {e for row in scores for e, s in enumerate(row) if s > quantiles(row, n=4, method="inclusive")[2] + 1e-9}
    top = {e for row in scores for e in best(row, k)}
    assert set(forecast_of(fate, scores).experts) == over | top
    prefill = forecast_of(fate, scores, prefill=True)
    count = Counter(e for row in scores for e in best(row, k))
    assert set(prefill.experts) == over | top
    assert prefill.bring is not None
    assert set(prefill.bring) == top
    assert [count[e] for e in prefill.experts] == sorted((count[e] for e in prefill.experts), reverse=True)
    assert prefill.bring == prefill.experts[: len(top)]


def test_cross_layer_brings_as_many_loads_as_a_layer_hides() -> None:
    wide = ModelShape((0, 1), 16, 2)
    row = tuple(float(e) for e in range(16))  # over the 75th percentile, 11.25: 15, 14, 13, 12
    fate = CrossLayer(wide)
    assert forecast_of(fate, (row,)) == Forecast(NEXT, (15, 14, 13, 12), (15, 14, 13, 12))  # nothing measured, no limit
    fate.on_paced(0.0, 0.0)
    assert forecast_of(fate, (row,)).bring == (15, 14, 13, 12)
    fate.on_paced(0.1, 0.3)  # as in the paper: 6 ms a load, 13 ms a layer, two loads
    assert forecast_of(fate, (row,)).bring == (15, 14, 13)
    fate.on_paced(0.006, 0.013)
    assert forecast_of(fate, (row,)).bring == (15, 14)
    assert forecast_of(fate, (row,), {14, 13}).bring == (
        15,
        14,
        12,
    )  # 14 stays; 13 is there, not of the top-k
    fate.on_paced(0.02, 0.013)
    assert forecast_of(fate, (row,)).bring == ()
    assert forecast_of(fate, (row,), {14}) == Forecast(NEXT, (15, 14, 13, 12), (14,))


def test_equal_scores_exceed_no_percentile_and_the_top_k_are_expected_all_the_same() -> None:
    assert forecast_of(CrossLayer(SHAPE), ((0.125,) * 8,)).experts == (0, 1)


def test_the_next_layer_brings_its_top_k_the_highest_score_first() -> None:
    assert forecast_of(NextLayer(SHAPE), (ROW,)) == Forecast(NEXT, (1, 4))
    two = (ROW, (0.0, 0.2, 0.0, 0.4, 0.0, 0.0, 0.0, 0.0))
    assert forecast_of(NextLayer(SHAPE), two).experts == (3, 1, 4)  # 0.4, 0.3, 0.25: the second row's best comes first
    assert not list(NextLayer(SHAPE).on_foreseen(NEXT, (ROW,), (), True))


def test_with_an_alpha_only_top_score_experts_are_brought() -> None:
    """beta is 0.2, of expert 7: 1 has 1.5 of it, 4 has 1.25."""
    assert forecast_of(NextLayer(SHAPE, alpha=0.2), (ROW,)) == Forecast(NEXT, (1, 4), (1, 4))
    assert forecast_of(NextLayer(SHAPE, alpha=0.3), (ROW,)) == Forecast(NEXT, (1, 4), (1,))
    assert forecast_of(NextLayer(SHAPE, alpha=0.6), (ROW,)) == Forecast(NEXT, (1, 4), ())
    all_of_two = ModelShape((0, 1), 2, 2)
    assert forecast_of(NextLayer(all_of_two, alpha=0.3), ((0.6, 0.4),)).bring == (0, 1)  # nobody else is there
