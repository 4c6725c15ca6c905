"""Predictors that count, against counting over the whole history and cosines computed anew."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.errors import ConfigError
from scheduler.policies.predictors.base import Forecast, Predictor
from scheduler.policies.predictors.history import ActivationPath, RequestTraces
from scheduler.types import ModelShape, Visit

SHAPE = ModelShape((0, 2, 3), 6, 2)  # layer 1 is dense
TOKENS = st.lists(
    st.tuples(*[st.lists(st.integers(0, 5), min_size=2, max_size=2, unique=True)] * 3), min_size=1, max_size=12
)


def fired(
    predictor: Predictor, layer: int, named: dict[int, int], position: int = 0, request: int = 1
) -> list[Forecast]:
    return list(predictor.fired(Visit(request, position, layer), named, (), False))


def token(predictor: Predictor, *chosen: list[int], position: int = 0, request: int = 1) -> list[list[Forecast]]:
    return [
        fired(predictor, layer, dict.fromkeys(experts, 1), position, request)
        for layer, experts in zip(SHAPE.layers, chosen, strict=True)
    ]


@settings(max_examples=60)
@given(TOKENS)
def test_the_path_predicts_what_followed_most_often(tokens: list[tuple[list[int], ...]]) -> None:
    eap = ActivationPath(SHAPE)
    history: list[tuple[list[int], ...]] = []
    for position, chosen in enumerate(tokens):
        said = token(eap, *chosen, position=position)
        for at in (0, 1):
            pairs = Counter((a, b) for past in history for a in past[at] for b in past[at + 1])
            totals = Counter(a for past in history for a in past[at] for _ in past[at + 1])
            worth = {b: sum(pairs[a, b] / totals[a] for a in chosen[at] if totals[a]) for b in range(6)}
            expected = sorted((w for w in worth.values() if w > 0), reverse=True)[:2]
            if not expected:
                assert said[at] == []
                continue
            (forecast,) = said[at]
            assert forecast.visit == Visit(1, position, SHAPE.layers[at + 1])
            assert [worth[e] for e in forecast.experts] == pytest.approx(expected)
        assert said[2] == []
        history.append(chosen)


def test_when_a_pass_begins_the_first_layers_most_frequent_are_expected() -> None:
    eap = ActivationPath(SHAPE)
    assert not list(eap.begun(Visit(1, 1, 0), 1, False))
    for position, chosen in enumerate(([4, 1], [4, 2], [4, 1], [0, 1])):
        token(eap, chosen, [0, 1], [0, 1], position=position)
    assert list(eap.begun(Visit(9, 4, 0), 1, False)) == [Forecast(Visit(9, 4, 0), (1, 4))]
    assert not list(eap.begun(Visit(9, 4, 0), 60, True))


def test_a_path_is_that_of_one_token() -> None:
    """Neither another request's gate in between nor the layer before of another token counts as what came before."""
    eap = ActivationPath(SHAPE)
    fired(eap, 0, {1: 1, 2: 1}, request=1)
    fired(eap, 0, {4: 1, 5: 1}, request=2)
    fired(eap, 2, {0: 1, 3: 1}, request=1)
    assert fired(eap, 0, {1: 1, 2: 1}, request=3)[0].experts == (0, 3)
    assert fired(eap, 0, {4: 1, 5: 1}, request=4) == []
    fired(eap, 2, {1: 1, 2: 1}, position=7, request=4)  # its layer 0 was at position 0
    assert fired(eap, 0, {4: 1, 5: 1}, request=5) == []


def test_of_a_pass_of_many_tokens_popularity_is_learned() -> None:
    eap = ActivationPath(SHAPE)
    fired(eap, 0, {0: 9, 1: 1})
    fired(eap, 2, {3: 8, 4: 2})
    assert fired(eap, 0, {0: 1, 5: 1}, 1)[0].experts == (3, 4)


def test_a_pass_of_many_tokens_counts_as_that_many_and_no_more() -> None:
    """Ten tokens of prefill with 3 after 0, then twelve alone with 5 after 0."""
    eap = ActivationPath(SHAPE)
    fired(eap, 0, {0: 10, 1: 10})
    fired(eap, 2, {3: 10, 4: 10})
    for position in range(10, 22):
        fired(eap, 0, {0: 1, 2: 1}, position)
        fired(eap, 2, {5: 1, 2: 1}, position)
    assert fired(eap, 0, {0: 1}, 30)[0].experts == (2,)
    assert fired(eap, 0, {0: 1, 1: 1}, 31)[0].experts == (3, 4)


def history(tokens: int, seed: int, pool: tuple[int, ...]) -> list[tuple[list[int], ...]]:
    rng = Random(seed)
    return [tuple(rng.sample(pool, 2) for _ in SHAPE.layers) for _ in range(tokens)]


def matrix(tokens: list[tuple[list[int], ...]]) -> np.ndarray:
    counts = np.zeros((3, 6))
    for chosen in tokens:
        for layer, experts in enumerate(chosen):
            counts[layer, experts] += 1
    return counts


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 6))
def test_traces_predict_from_the_nearest_request(seed: int, stored: int) -> None:
    moe = RequestTraces(SHAPE, capacity=8)
    kept = []
    for request in range(stored):
        tokens = history(5, seed + request, (0, 1, 2, 3) if request % 2 else (2, 3, 4, 5))
        for position, chosen in enumerate(tokens):
            token(moe, *chosen, position=position, request=request)
        moe.closed(request)
        kept.append(matrix(tokens))
    now = np.zeros((3, 6))
    for position, chosen in enumerate(history(3, seed + 99, (0, 1, 2, 3))):
        for at, experts in enumerate(chosen):
            now[at, experts] += 1
            said = fired(moe, SHAPE.layers[at], dict.fromkeys(experts, 1), position, 77)
            seen = [layer for layer in range(3) if now[layer].any()]
            like = [np.mean([cosine(now[la], old[la]) for la in seen]) for old in kept]
            assert [f.visit.layer for f in said] == list(SHAPE.layers[at + 1 :])
            for forecast in said:
                layer = SHAPE.layers.index(forecast.visit.layer)
                most = [sorted(old[layer], reverse=True)[:2] for old in kept]
                fits = [
                    [old[layer][e] for e in forecast.experts] == most[n]
                    for n, old in enumerate(kept)
                    if like[n] > max(like) - 1e-6
                ]
                assert any(fits)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def test_with_nothing_stored_a_requests_own_counts_serve() -> None:
    moe = RequestTraces(SHAPE)
    assert token(moe, [0, 1], [2, 3], [4, 5]) == [[], [], []]
    assert list(moe.begun(Visit(1, 1, 0), 1, False)) == [
        Forecast(Visit(1, 1, 0), (0, 1)),
        Forecast(Visit(1, 1, 2), (2, 3)),
    ]
    assert not list(moe.begun(Visit(2, 0, 0), 1, False))
    assert fired(moe, 0, {5: 1, 4: 1}, 1) == [Forecast(Visit(1, 1, 2), (2, 3)), Forecast(Visit(1, 1, 3), (4, 5))]


def test_so_many_layers_ahead() -> None:
    moe = RequestTraces(SHAPE, ahead=1)
    token(moe, [0, 1], [2, 3], [4, 5])
    assert [f.visit.layer for f in fired(moe, 0, {0: 1}, 1)] == [2]


def test_when_full_the_most_alike_makes_room_and_what_is_kept_is_bounded() -> None:
    moe = RequestTraces(SHAPE, capacity=2)
    for request, pair in enumerate(([0, 1], [4, 5], [0, 1], [0, 1], [0, 1])):
        for position in range(3):
            token(moe, pair, pair, pair, position=position, request=request)
        moe.closed(request)
    assert fired(moe, 0, {4: 1}, request=50)[0].experts == (4,)  # still there: the others replaced each other
    assert fired(moe, 0, {1: 1, 0: 1}, request=51)[0].experts == (0, 1)
    for request in range(100, 140):
        token(moe, *history(1, request, (0, 1, 2, 3, 4, 5))[0], request=request)
        moe.closed(request)
    arrays = [v for v in vars(moe).values() if isinstance(v, np.ndarray)]
    assert [a.shape for a in arrays] == [(2, 3, 6)]
    assert set(vars(moe)["_open"]) == {50, 51}


def test_a_trace_stored_while_a_request_is_open_counts_for_it_from_then_on() -> None:
    moe = RequestTraces(SHAPE)
    fired(moe, 0, {0: 1, 1: 1}, request=2)
    token(moe, [0, 1], [2, 5], [3, 4], request=1)
    moe.closed(1)
    assert [f.experts for f in fired(moe, 0, {0: 1, 1: 1}, 1, request=2)] == [(2, 5), (3, 4)]


def test_a_request_that_never_fired_leaves_no_trace() -> None:
    moe = RequestTraces(SHAPE)
    moe.closed(1)
    assert token(moe, [0, 1], [2, 3], [4, 5]) == [[], [], []]


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="capacity 0"):
        RequestTraces(SHAPE, capacity=0)
