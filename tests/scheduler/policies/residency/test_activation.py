"""MoE-Infinity's priority against its formula."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.errors import ConfigError
from scheduler.policies.residency.activation import EPSILON, ActivationAware
from scheduler.types import ExpertId, ModelShape, Visit
from support.scheduling.cache_driver import Device

SHAPE = ModelShape((1, 2, 5, 8), 3, 1)
EVERYONE = [ExpertId(layer, number) for layer in SHAPE.layers for number in range(3)]


NAMED = st.dictionaries(st.integers(0, 2), st.integers(1, 9), min_size=1)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(SHAPE.layers), NAMED, st.booleans()), max_size=20))
def test_ratio_times_decay(gates: list[tuple[int, dict[int, int], bool]]) -> None:
    policy = ActivationAware(SHAPE)
    matrix: Counter[tuple[int, int]] = Counter()
    for layer, named, prefill in gates:
        policy.observed(Visit(3, 0, layer), named, (), prefill)
        matrix.update({(layer, number): rows for number, rows in named.items()})
    expected = {}
    for ordinal, layer in enumerate(SHAPE.layers):
        tokens = sum(matrix[layer, number] for number in range(3))
        for number in range(3):
            ratio = matrix[layer, number] / tokens if tokens else 0
            expected[layer, number] = (ratio + EPSILON) * (4 - ordinal) / 4
    assert {expert: policy.priority(expert) for expert in EVERYONE} == pytest.approx(expected)
    assert expected[policy.victim(0, EVERYONE[0], EVERYONE)] == pytest.approx(min(expected.values()))


def test_among_the_unused_the_last_layers_go_first() -> None:
    policy = ActivationAware(SHAPE)
    assert policy.victim(0, EVERYONE[0], EVERYONE) == ExpertId(8, 0)
    policy.observed(Visit(0, 0, 8), {0: 1, 1: 1, 2: 1}, (), False)
    assert policy.victim(0, EVERYONE[0], EVERYONE) == ExpertId(5, 0)


def test_requests_under_way_are_added_and_those_that_are_over_are_forgotten() -> None:
    policy = ActivationAware(SHAPE, recent=2)
    policy.observed(Visit(0, 0, 1), {0: 4}, (), True)
    policy.observed(Visit(1, 0, 1), {1: 1}, (), True)
    assert policy.priority(ExpertId(1, 0)) == pytest.approx(0.8 + EPSILON)
    for _ in range(8):
        policy.observed(Visit(1, 0, 2), {0: 1}, (), False)
    assert policy.priority(ExpertId(1, 0)) == pytest.approx(EPSILON)
    assert policy.priority(ExpertId(1, 1)) == pytest.approx(1 + EPSILON)
    policy.observed(Visit(0, 0, 1), {2: 1}, (), True)
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


def test_recent_must_be_some() -> None:
    with pytest.raises(ConfigError, match="traces-recent is 0; allowed: 1"):
        ActivationAware(SHAPE, recent=0)
