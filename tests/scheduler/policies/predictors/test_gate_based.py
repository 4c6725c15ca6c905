"""Predictors that read gates ahead: by hand, against statistics.quantiles, and against counting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from statistics import quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.errors import ConfigError
from scheduler.policies.predictors.base import Forecast, Predictor, Scores
from scheduler.policies.predictors.gate_based import CrossLayer, NextGate, NextLayer, Stacked
from scheduler.policies.predictors.impact import Impact
from scheduler.types import ModelShape, Visit

SHAPE = ModelShape((0, 1, 2, 3), 8, 2)
NEXT = Visit(1, 9, 1)
ROW = (0.05, 0.3, 0.1, 0.02, 0.25, 0.03, 0.05, 0.2)  # best first: 1, 4, 7, 2, 0, 6, 5, 3
TABLE = st.integers(4, 12).flatmap(
    lambda e: st.lists(
        st.lists(st.integers(0, 99), min_size=e, max_size=e, unique=True).map(tuple), min_size=1, max_size=5
    ).map(tuple)
)


def said(
    predictor: Predictor,
    scores: Scores,
    resident: Collection[int] = (),
    prefill: bool = False,
    visit: Visit = NEXT,
) -> Forecast:
    (forecast,) = predictor.foreseen(visit, scores, resident, prefill)
    assert forecast.visit == visit
    assert len(set(forecast.experts)) == len(forecast.experts)
    return forecast


def fire(predictor: Predictor, layer: int, *named: int, position: int = 9, request: int = 1) -> None:
    assert not list(predictor.fired(Visit(request, position, layer), dict.fromkeys(named, 1), (), False))


def best(row: tuple[float, ...], k: int) -> list[int]:
    return sorted(range(len(row)), key=lambda e: -row[e])[:k]


def test_what_each_wants_computed() -> None:
    made = (NextGate(SHAPE), CrossLayer(SHAPE), NextLayer(SHAPE), Stacked(SHAPE), Impact(SHAPE))
    assert [p.foresight for p in made] == ["gate", "gate", "attention", "gates", "gates"]


def test_the_next_gate_brings_its_top_k_in_the_order_of_scores() -> None:
    assert said(NextGate(SHAPE), (ROW,), {4}) == Forecast(NEXT, (1, 4))
    assert said(NextGate(SHAPE, prefetch=1), (ROW,)) == Forecast(NEXT, (1, 4), (1,))
    assert said(NextGate(SHAPE, prefetch=3), (ROW,)) == Forecast(NEXT, (1, 4), (1, 4, 7))
    assert not list(NextGate(SHAPE).foreseen(NEXT, (ROW,), (), True))
    assert not list(NextGate(SHAPE).foreseen(NEXT, (), (), False))


@given(TABLE, st.integers(1, 4))
def test_of_several_rows_what_most_want_comes_first(scores: Scores, k: int) -> None:
    experts = said(NextGate(ModelShape((0, 1), len(scores[0]), k)), scores).experts
    count = Counter(e for row in scores for e in best(row, k))
    assert set(experts) == set(count)
    weigh = [(count[e], sum(row[e] for row in scores)) for e in experts]
    assert weigh == sorted(weigh, reverse=True)


@given(TABLE, st.integers(1, 4))
def test_cross_layer_expects_what_is_over_the_75th_percentile_and_the_top_k(scores: Scores, k: int) -> None:
    """quantiles(..., "inclusive") cuts where numpy's percentile does."""
    fate = CrossLayer(ModelShape((0, 1), len(scores[0]), k))
    over = {e for row in scores for e, s in enumerate(row) if s > quantiles(row, n=4, method="inclusive")[2] + 1e-9}
    top = {e for row in scores for e in best(row, k)}
    assert set(said(fate, scores).experts) == over | top
    prefill = said(fate, scores, prefill=True)
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
    assert said(fate, (row,)) == Forecast(NEXT, (15, 14, 13, 12), (15, 14, 13, 12))  # nothing measured, no limit
    fate.paced(0.0, 0.0)
    assert said(fate, (row,)).bring == (15, 14, 13, 12)
    fate.paced(0.1, 0.3)  # as in the paper: 6 ms a load, 13 ms a layer, two loads
    assert said(fate, (row,)).bring == (15, 14, 13)
    fate.paced(0.006, 0.013)
    assert said(fate, (row,)).bring == (15, 14)
    assert said(fate, (row,), {14, 13}).bring == (15, 14, 12)  # 14 is there and to stay; 13 is there, not of the top-k
    fate.paced(0.02, 0.013)
    assert said(fate, (row,)).bring == ()
    assert said(fate, (row,), {14}) == Forecast(NEXT, (15, 14, 13, 12), (14,))
    least = CrossLayer(wide, least=1)
    least.paced(0.02, 0.013)
    assert said(least, (row,)).bring == (15,)


def test_equal_scores_exceed_no_percentile_and_the_top_k_are_expected_all_the_same() -> None:
    assert said(CrossLayer(SHAPE), ((0.125,) * 8,)).experts == (0, 1)


def test_the_next_layer_brings_its_top_k_the_highest_score_first() -> None:
    assert said(NextLayer(SHAPE), (ROW,)) == Forecast(NEXT, (1, 4))
    two = (ROW, (0.0, 0.2, 0.0, 0.4, 0.0, 0.0, 0.0, 0.0))
    assert said(NextLayer(SHAPE), two).experts == (3, 1, 4)  # 0.4, 0.3, 0.25: the second row's best comes first
    assert not list(NextLayer(SHAPE).foreseen(NEXT, (ROW,), (), True))


def test_with_an_alpha_only_top_score_experts_are_brought() -> None:
    """beta is 0.2, of expert 7: 1 has 1.5 of it, 4 has 1.25."""
    assert said(NextLayer(SHAPE, alpha=0.2), (ROW,)) == Forecast(NEXT, (1, 4), (1, 4))
    assert said(NextLayer(SHAPE, alpha=0.3), (ROW,)) == Forecast(NEXT, (1, 4), (1,))
    assert said(NextLayer(SHAPE, alpha=0.6), (ROW,)) == Forecast(NEXT, (1, 4), ())
    all_of_two = ModelShape((0, 1), 2, 2)
    assert said(NextLayer(all_of_two, alpha=0.3), ((0.6, 0.4),)).bring == (0, 1)  # nobody else is there


def test_stacked_loads_for_the_nearest_layer_that_lacks_something() -> None:
    hobbit = Stacked(SHAPE)
    fire(hobbit, 0, 5, 6)
    assert said(hobbit, (ROW,), {1, 4}, visit=Visit(1, 9, 1)).bring is None  # all there: look further
    assert said(hobbit, (ROW,), {1}, visit=Visit(1, 9, 2)).bring is None  # lacks 4
    assert said(hobbit, (ROW,), (), visit=Visit(1, 9, 3)) == Forecast(Visit(1, 9, 3), (1, 4), ())
    assert said(hobbit, (ROW,), {4}, visit=Visit(1, 9, 3)).bring == (4,)  # perhaps brought at an earlier gate
    assert said(hobbit, (ROW,), (), visit=Visit(2, 9, 3)).bring is None  # another request's gate
    fire(hobbit, 1, 1, 4)
    assert said(hobbit, (ROW,), (), visit=Visit(1, 9, 3)).bring is None
    one = Stacked(SHAPE, prefetch=1)
    assert said(one, (ROW,), {1}, visit=Visit(1, 9, 1)).bring == (1,)  # 4 would not be brought, so it is not lacking
    assert said(one, (ROW,), (), visit=Visit(1, 9, 2)).bring == (1,)


def test_impact_begins_no_load_that_would_hide_nothing() -> None:
    """A layer takes 10, a load 8: of one queue, loads begin at 0, 8, 16; layer 1 begins at 10, 2 at 20."""
    impact = Impact(SHAPE)
    impact.paced(8, 10)
    fire(impact, 0, 5)
    wide = (ROW, (0.0, 0.0, 0.0, 0.4, 0.0, 0.3, 0.0, 0.0))
    assert said(impact, wide, {4}, visit=Visit(1, 9, 1)) == Forecast(Visit(1, 9, 1), (3, 5, 1, 4), (4, 3, 5))
    assert said(impact, (ROW,), (), visit=Visit(1, 9, 2)).bring == (1,)
    assert said(impact, (ROW,), (), visit=Visit(1, 9, 3)).bring == (1,)  # begins at 24, layer 3 at 30; then at 32
    fire(impact, 1, 1)
    assert said(impact, (ROW,), (), visit=Visit(1, 9, 2)).bring == (1, 4)


def test_impact_without_measurements_brings_the_top_k_and_never_more_than_it_may() -> None:
    impact = Impact(SHAPE, prefetch=3)
    assert not list(impact.foreseen(NEXT, (ROW,), (), False))  # no gate so far: nobody knows how far ahead
    fire(impact, 0, 5)
    assert [said(impact, (ROW,), (), visit=Visit(1, 9, n)).bring for n in (1, 2, 3)] == [(1, 4), (1,), ()]


def test_impact_brings_first_what_has_come_true_more_often() -> None:
    """The second place comes true always, the first never: the second is worth more from then on."""
    impact = Impact(SHAPE)
    impact.paced(8, 4)  # one load a layer
    for position in range(4):
        fire(impact, 0, 5, position=position)
        forecast = said(impact, (ROW,), (), visit=Visit(1, position, 1))
        assert forecast.experts == (1, 4)
        assert forecast.bring == ((1,) if position == 0 else (4,))
        fire(impact, 1, 4, 6, position=position)
    assert (impact.likely(1, 0), impact.likely(1, 1), impact.likely(2, 0)) == (1 / 5, 1, 1)


def test_impact_weighs_how_likely_by_how_many_rows() -> None:
    """The first place is right half as often as the others; three rows want it, one row each of the others."""
    impact = Impact(SHAPE)
    fire(impact, 0, 5)
    said(impact, (ROW,))
    fire(impact, 1, 4, 6)
    assert (impact.likely(1, 0), impact.likely(1, 1)) == (0.5, 1.0)
    fire(impact, 0, 5, position=10)
    rows = tuple(tuple(4.0 * (e == 1) + 0.1 * e * (e == second) for e in range(8)) for second in (4, 7, 2))
    forecast = said(impact, rows, visit=Visit(1, 10, 1))
    assert forecast.bring == (1, 7, 4, 2)


def test_impact_in_prefill_weighs_by_rows() -> None:
    impact = Impact(SHAPE)
    list(impact.fired(Visit(1, 0, 0), {1: 3}, (), True))
    two = (0.0, 0.0, 0.0, 0.4, 0.0, 0.3, 0.0, 0.0)
    forecast = said(impact, (ROW, two, two), (), True, Visit(1, 0, 1))
    assert forecast.bring == (3, 5, 1, 4)


def test_nothing_of_a_closed_request_is_kept() -> None:
    for predictor in (Stacked(SHAPE), Impact(SHAPE)):
        empty = {name: str(value) for name, value in vars(predictor).items()}
        for request in range(5):
            fire(predictor, 0, 5, request=request)
            said(predictor, (ROW,), (), visit=Visit(request, 9, 1))
            predictor.closed(request)
        assert {name: str(value) for name, value in vars(predictor).items()} == empty


@pytest.mark.parametrize(
    "make",
    [
        lambda: NextGate(SHAPE, prefetch=0),
        lambda: CrossLayer(SHAPE, percentile=101),
        lambda: CrossLayer(SHAPE, least=-1),
        lambda: NextLayer(SHAPE, alpha=-0.1),
        lambda: Impact(SHAPE, prefetch=0),
    ],
)
def test_options_that_cannot_be_are_refused(make: type) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        make()
