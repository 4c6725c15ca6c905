"""LRFU against the paper's definition, and against LRU and LFU, which are its two ends."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policies.residency.base import Residency
from scheduler.policies.residency.lrfu import DECAY, LRFU
from scheduler.policies.residency.lru import LFU, LRU
from scheduler.types import ExpertId, ModelShape, Visit
from support.scheduling.cache_driver import Device

SHAPE = ModelShape((1, 3, 5), 4, 2)
KEYS = st.tuples(st.sampled_from(SHAPE.layers), st.integers(0, 3))


def combined_value(key: tuple[int, int], asked: list[tuple[int, int]], decay: Fraction) -> Fraction:
    """The paper's definition of CRF: the sum of F(x) = decay^x over all references of `key`, x being the time since
    each, in tokens of its layer."""
    of_layer = [other for other in asked if other[0] == key[0]]
    return sum((decay ** (len(of_layer) - 1 - i) for i, other in enumerate(of_layer) if other == key), Fraction(0))


@pytest.mark.parametrize("decay", [Fraction(1, 2), Fraction(3, 4), Fraction(1)], ids=str)
@settings(max_examples=60)
@given(slots=st.integers(1, 8), asked=st.lists(KEYS, max_size=24))
def test_lrfu_against_brute_force(decay: Fraction, slots: int, asked: list[tuple[int, int]]) -> None:
    """With decays and lengths for which floats are exact, so that equal values are equal in both."""
    cache = Device(LRFU(SHAPE, float(decay)), SHAPE, slots)
    there: set[tuple[int, int]] = set()
    for i, key in enumerate(asked):
        assert cache.gate(key[0], [key[1]]) == [key in there]
        if key not in there and len(there) == slots:
            values = {old: combined_value(old, asked[: i + 1], decay) for old in there}
            last = {used: j for j, used in enumerate(asked[:i])}
            there.remove(min(there, key=lambda old: (values[old], last[old])))
        there.add(key)
        assert {(expert.layer, expert.expert) for expert in cache.kept} == there


@settings(max_examples=60)
@given(st.lists(KEYS, max_size=100), st.floats(0.01, 1))
def test_values_are_those_of_the_definition(asked: list[tuple[int, int]], decay: float) -> None:
    policy = LRFU(SHAPE, decay)
    for position, (layer, number) in enumerate(asked):
        policy.on_gate_fired(Visit(0, position, layer), {number: 1}, (), False)
    for layer in SHAPE.layers:
        for number in range(4):
            expected = float(combined_value((layer, number), asked, Fraction(decay)))
            assert policy.value(ExpertId(layer, number)) == pytest.approx(expected)


@settings(max_examples=60)
@given(st.integers(1, 8), st.lists(st.tuples(st.sampled_from(SHAPE.layers), st.sets(st.integers(0, 3), min_size=1))))
def test_without_decay_it_is_lfu(slots: int, gates: list[tuple[int, set[int]]]) -> None:
    """The paper's F(x) = 1, for lambda 0."""
    frequency, both = Device(LFU(SHAPE), SHAPE, slots), Device(LRFU(SHAPE, 1.0), SHAPE, slots)
    for layer, experts in gates:
        for number in experts:  # one by one: LFU counts a use when its rows are sent, and LRFU at the gate
            assert both.gate(layer, [number]) == frequency.gate(layer, [number])
        assert list(both.kept) == list(frequency.kept)


@pytest.mark.parametrize("decay", [0.5, 0.3, 0.001])
@settings(max_examples=60)
@given(slots=st.integers(1, 8), asked=st.lists(st.integers(0, 7), max_size=150))
def test_with_a_decay_of_a_half_or_less_it_is_lru(decay: float, slots: int, asked: list[int]) -> None:
    """The paper's lambda 1: the sum of decay^j over j > i is at most decay^i."""
    shape = ModelShape((0,), 8, 1)
    recency, both = Device(LRU(shape), shape, slots), Device(LRFU(shape, decay), shape, slots)
    for number in asked:
        assert both.gate(0, [number]) == recency.gate(0, [number])
        assert list(both.kept) == list(recency.kept)


def test_time_passes_by_the_tokens_of_the_experts_layer() -> None:
    policy = LRFU(SHAPE)
    policy.on_gate_fired(Visit(0, 0, 1), {0: 1, 1: 1}, (), False)
    for position in range(5):
        policy.on_gate_fired(Visit(0, position, 3), {0: 1, 1: 1}, (), False)
    assert policy.value(ExpertId(1, 0)) == 1
    assert policy.value(ExpertId(3, 0)) == pytest.approx((1 - DECAY**5) / (1 - DECAY))
    policy.on_gate_fired(Visit(0, 1, 1), {1: 1, 2: 1}, (), False)
    assert [policy.value(ExpertId(1, number)) for number in range(4)] == [DECAY, 1 + DECAY, 1, 0]


@pytest.mark.parametrize("count", range(7))
def test_rows_of_a_pass_count_as_if_any_of_its_tokens_had_chosen_them(count: int) -> None:
    """A pass of six tokens that choose two experts each: the mean over all possible orders of the tokens."""
    policy = LRFU(SHAPE)
    policy.on_gate_fired(Visit(0, 0, 1), {0: 1, 1: 1}, (), False)
    policy.on_gate_fired(Visit(0, 1, 1), {0: count, 2: 6, 3: 6 - count}, (), True)
    orders = [sum(DECAY**age for age in ages) for ages in combinations(range(6), count)]
    assert policy.value(ExpertId(1, 0)) == pytest.approx(DECAY**6 + sum(orders) / len(orders))
    assert policy.value(ExpertId(1, 1)) == pytest.approx(DECAY**6)


def test_an_expert_comes_back_with_its_value() -> None:
    shape = ModelShape((0,), 4, 1)
    cache = Device(LRFU(shape), shape, 2)
    for number in (0, 0, 0, 1, 1, 1, 1, 2, 0):  # 2 makes 0 leave, and 0 makes 2 leave
        cache.gate(0, [number])
    assert {expert.expert for expert in cache.kept} == {0, 1}
    cache.gate(0, [3])
    assert {expert.expert for expert in cache.kept} == {1, 3}


def test_it_beats_recency_and_frequency_where_popularity_drifts() -> None:
    """Two tokens in three choose among popular experts, which change every 200 tokens."""
    shape, draw = ModelShape((0,), 32, 1), Random(7)
    routes = []
    for _ in range(8):
        popular = draw.sample(range(32), 6)
        routes += [draw.choice(popular) if draw.random() < 2 / 3 else draw.randrange(32) for _ in range(200)]

    def hits(policy: Callable[[ModelShape], Residency]) -> int:
        cache = Device(policy(shape), shape, 8)
        return sum(cache.gate(0, [number])[0] for number in routes)

    assert hits(LRFU) > 1.05 * hits(LRU)
    assert hits(LRFU) > 1.05 * hits(LFU)
