"""MoE-Infinity: prediction against cosines computed anew, the cache's priority against its formula."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policies.baselines import moe_infinity
from scheduler.policies.baselines.moe_infinity import EPSILON, RECENT_PASSES, ActivationAware, RequestTraces
from scheduler.policies.predictors.base import Forecast
from scheduler.types import ExpertId, ModelShape, Visit
from support.scheduling.cache_driver import Device
from support.scheduling.gate_history import SHAPE, fired, token

FOUR_LAYERS = ModelShape((1, 2, 5, 8), 3, 1)
EVERYONE = [ExpertId(layer, number) for layer in FOUR_LAYERS.layers for number in range(3)]


NAMED = st.dictionaries(st.integers(0, 2), st.integers(1, 9), min_size=1)


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
    moe = RequestTraces(SHAPE)
    kept = []
    for request in range(stored):
        tokens = history(5, seed + request, (0, 1, 2, 3) if request % 2 else (2, 3, 4, 5))
        for position, chosen in enumerate(tokens):
            token(moe, *chosen, position=position, request=request)
        moe.on_request_closed(request)
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
    assert list(moe.on_pass_begun(Visit(1, 1, 0), 1, False)) == [
        Forecast(Visit(1, 1, 0), (0, 1)),
        Forecast(Visit(1, 1, 2), (2, 3)),
    ]
    assert not list(moe.on_pass_begun(Visit(2, 0, 0), 1, False))
    assert fired(moe, 0, {5: 1, 4: 1}, 1) == [Forecast(Visit(1, 1, 2), (2, 3)), Forecast(Visit(1, 1, 3), (4, 5))]


def test_two_layers_ahead() -> None:
    moe = RequestTraces(ModelShape((0, 2, 3, 4), 6, 2))
    for layer in (0, 2, 3, 4):
        fired(moe, layer, {0: 1, 1: 1})
    assert [f.visit.layer for f in fired(moe, 0, {0: 1}, 1)] == [2, 3]


def test_when_full_the_most_alike_makes_room_and_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_infinity, "CAPACITY", 2)
    moe = RequestTraces(SHAPE)
    for request, pair in enumerate(([0, 1], [4, 5], [0, 1], [0, 1], [0, 1])):
        for position in range(3):
            token(moe, pair, pair, pair, position=position, request=request)
        moe.on_request_closed(request)
    assert fired(moe, 0, {4: 1}, request=50)[0].experts == (4,)  # still there: the others replaced each other
    assert fired(moe, 0, {1: 1, 0: 1}, request=51)[0].experts == (0, 1)
    for request in range(100, 140):
        token(moe, *history(1, request, (0, 1, 2, 3, 4, 5))[0], request=request)
        moe.on_request_closed(request)
    arrays = [v for v in vars(moe).values() if isinstance(v, np.ndarray)]
    assert [a.shape for a in arrays] == [(2, 3, 6)]
    assert set(vars(moe)["_open"]) == {50, 51}


def test_a_trace_stored_while_a_request_is_open_counts_for_it_from_then_on() -> None:
    moe = RequestTraces(SHAPE)
    fired(moe, 0, {0: 1, 1: 1}, request=2)
    token(moe, [0, 1], [2, 5], [3, 4], request=1)
    moe.on_request_closed(1)
    assert [f.experts for f in fired(moe, 0, {0: 1, 1: 1}, 1, request=2)] == [(2, 5), (3, 4)]


def test_a_request_that_never_fired_leaves_no_trace() -> None:
    moe = RequestTraces(SHAPE)
    moe.on_request_closed(1)
    assert token(moe, [0, 1], [2, 3], [4, 5]) == [[], [], []]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(FOUR_LAYERS.layers), NAMED, st.booleans()), max_size=20))
def test_ratio_times_decay(gates: list[tuple[int, dict[int, int], bool]]) -> None:
    policy = ActivationAware(FOUR_LAYERS)
    matrix: Counter[tuple[int, int]] = Counter()
    for layer, named, prefill in gates:
        policy.on_gate_fired(Visit(3, 0, layer), named, (), prefill)
        matrix.update({(layer, number): rows for number, rows in named.items()})
    expected = {}
    for ordinal, layer in enumerate(FOUR_LAYERS.layers):
        tokens = sum(matrix[layer, number] for number in range(3))
        for number in range(3):
            ratio = matrix[layer, number] / tokens if tokens else 0
            expected[layer, number] = (ratio + EPSILON) * (4 - ordinal) / 4
    assert {expert: policy.priority(expert) for expert in EVERYONE} == pytest.approx(expected)
    assert expected[policy.victim(0, EVERYONE[0], EVERYONE)] == pytest.approx(min(expected.values()))


def test_among_the_unused_the_last_layers_go_first() -> None:
    policy = ActivationAware(FOUR_LAYERS)
    assert policy.victim(0, EVERYONE[0], EVERYONE) == ExpertId(8, 0)
    policy.on_gate_fired(Visit(0, 0, 8), {0: 1, 1: 1, 2: 1}, (), False)
    assert policy.victim(0, EVERYONE[0], EVERYONE) == ExpertId(5, 0)


def test_requests_under_way_are_added_and_those_that_are_over_are_forgotten() -> None:
    policy = ActivationAware(FOUR_LAYERS)
    policy.on_gate_fired(Visit(0, 0, 1), {0: 4}, (), True)
    policy.on_gate_fired(Visit(1, 0, 1), {1: 1}, (), True)
    assert policy.priority(ExpertId(1, 0)) == pytest.approx(0.8 + EPSILON)
    for _ in range(RECENT_PASSES * 4):
        policy.on_gate_fired(Visit(1, 0, 2), {0: 1}, (), False)
    assert policy.priority(ExpertId(1, 0)) == pytest.approx(EPSILON)
    assert policy.priority(ExpertId(1, 1)) == pytest.approx(1 + EPSILON)
    policy.on_gate_fired(Visit(0, 0, 1), {2: 1}, (), True)
    assert policy.priority(ExpertId(1, 2)) == pytest.approx(0.5 + EPSILON), "heard of again: it begins anew"


def test_on_a_device() -> None:
    """What this request used often stays, however long ago."""
    shape = ModelShape((0, 1), 4, 1)
    cache = Device(ActivationAware(shape), shape, 3)
    cache.gate(0, {0: 5, 1: 1}, prefill=True)
    cache.gate(1, {2: 6}, prefill=True)
    for number in (1, 3, 1, 3):
        cache.gate(0, [number])
    assert cache.gate(0, [0]) == [True]
    assert cache.gate(1, [2]) == [True]
