"""SMOE's token-wise prediction: what is brought, and where it stops (flex)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.policies.predictors import token_wise
from scheduler.policies.predictors.base import Forecast
from scheduler.policies.predictors.token_wise import WARM_UP, TokenWise
from scheduler.types import ModelShape, Visit

SHAPE = ModelShape((1, 2, 3, 4, 5), 8, 2)
ROW = (0.05, 0.3, 0.1, 0.02, 0.25, 0.03, 0.06, 0.2)  # best first: 1, 4, 7, 2, 6, 0, 5, 3
ORDER = (1, 4, 7, 2, 6, 0, 5, 3)


def forecast_of(predictor: TokenWise, *resident: int, layer: int = 1, position: int = 5) -> Forecast:
    (forecast,) = predictor.on_foreseen(Visit(1, position, layer), (ROW,), resident, False)
    return forecast


def test_it_expects_the_top_k_of_the_same_layer() -> None:
    assert TokenWise.foresight == "token"
    assert forecast_of(TokenWise(SHAPE)) == Forecast(Visit(1, 5, 1), (1, 4), (1, 4))
    assert not list(TokenWise(SHAPE).on_foreseen(Visit(1, 5, 1), (ROW,), (), True))


def test_fixed_n_walks_down_the_ranking_adaptive_stops_at_the_top_n() -> None:
    assert forecast_of(TokenWise(SHAPE, prefetch=2), 1, 7).bring == (4, 2)
    assert forecast_of(TokenWise(SHAPE, prefetch=2, adaptive=True), 1, 7).bring == (4,)
    assert forecast_of(TokenWise(SHAPE, prefetch=3), *range(8)).bring == ()
    assert forecast_of(TokenWise(SHAPE, prefetch=3), *ORDER[:6]).bring == (5, 3)


@given(st.sets(st.integers(0, 7)), st.integers(1, 8))
def test_as_many_as_n_or_as_there_are(resident: set[int], n: int) -> None:
    fixed = forecast_of(TokenWise(SHAPE, prefetch=n), *resident).bring
    adaptive = forecast_of(TokenWise(SHAPE, prefetch=n, adaptive=True), *resident).bring
    assert fixed is not None
    assert adaptive is not None
    assert len(fixed) == min(n, 8 - len(resident))
    assert set(adaptive) == set(ORDER[:n]) - resident
    assert fixed[: len(adaptive)] == adaptive
    assert not resident & set(fixed)


def run(predictor: TokenWise, tokens: int, right: dict[int, int]) -> None:
    """So many tokens; in each layer, `right[layer]` of the two experts are what was expected."""
    for position in range(5, 5 + tokens):
        for layer in SHAPE.layers:
            forecast_of(predictor, layer=layer, position=position)
        for layer in SHAPE.layers:
            named = [*ORDER[: right[layer]], *ORDER[-2:]][:2]
            assert not list(predictor.on_gate_fired(Visit(1, position, layer), dict.fromkeys(named, 1), (), False))


RIGHT = {1: 1, 2: 2, 3: 0, 4: 2, 5: 1}


def test_flex_stops_the_half_of_the_layers_that_is_right_least_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_wise, "WARM_UP", 3)
    flex = TokenWise(SHAPE, flex=True)
    run(flex, 2, RIGHT)
    assert flex.silent is None
    assert all(forecast_of(flex, layer=layer).bring for layer in SHAPE.layers)
    run(flex, 1, RIGHT)
    assert [flex.accuracy(layer) for layer in SHAPE.layers] == [0.5, 1.0, 0.0, 1.0, 0.5]
    assert flex.silent == {3, 1}  # of 1 and 5, as often right, the shallower; two of five
    assert forecast_of(flex, layer=3) == Forecast(Visit(1, 5, 3), (1, 4), ())  # expected all the same
    assert forecast_of(flex, layer=5).bring == (1, 4)
    run(flex, 5, {1: 2, 2: 0, 3: 2, 4: 0, 5: 0})
    assert flex.silent == {3, 1}  # settled once


def test_without_flex_it_goes_on_everywhere() -> None:
    plain = TokenWise(SHAPE)
    run(plain, WARM_UP + 1, RIGHT)
    assert plain.silent is None
    assert plain.accuracy(2) == 1.0


def test_only_what_was_said_about_the_very_visit_is_compared() -> None:
    smoe = TokenWise(SHAPE)
    forecast_of(smoe, layer=1, position=5)
    list(smoe.on_gate_fired(Visit(1, 6, 1), {1: 1, 4: 1}, (), False))
    list(smoe.on_gate_fired(Visit(2, 5, 1), {1: 1, 4: 1}, (), False))
    assert smoe.accuracy(1) is None
    forecast_of(smoe, layer=1, position=6)
    smoe.on_request_closed(1)
    list(smoe.on_gate_fired(Visit(1, 6, 1), {1: 1, 4: 1}, (), False))
    assert smoe.accuracy(1) is None
