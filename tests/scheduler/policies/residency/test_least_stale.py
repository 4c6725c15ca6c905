"""Least-Stale against its rule, written down a second time over the whole history."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policies.residency.least_stale import LeastStale
from scheduler.policies.residency.lru import LRU
from scheduler.types import ExpertId, ModelShape
from support.scheduling.cache_driver import Device

SHAPE = ModelShape((1, 3, 5), 4, 2)
PASSES = st.lists(st.tuples(*[st.sets(st.integers(0, 3), min_size=1, max_size=1)] * 3), max_size=25)

Key = tuple[int, int]


def first_to_go(there: set[Key], used: dict[Key, tuple[int, int]], now: int, layer: int) -> Key:
    """`used`: expert -> the pass and the clock of its last use. Four lists, one after the other."""
    stale = [key for key in there if used[key][0] < now]
    for group in (stale, [key for key in there if key not in stale]):
        behind, ahead = [key for key in group if key[0] <= layer], [key for key in group if key[0] > layer]
        if behind:
            nearest_start = min(key[0] for key in behind)
            return min((key for key in behind if key[0] == nearest_start), key=lambda key: used[key][1])
        if ahead:
            farthest = max(key[0] for key in ahead)
            return min((key for key in ahead if key[0] == farthest), key=lambda key: used[key][1])
    raise AssertionError("nothing is there")


@settings(max_examples=80)
@given(st.integers(1, 9), PASSES)
def test_least_stale_against_the_rule_retyped(slots: int, passes: list[tuple[set[int], ...]]) -> None:
    cache = Device(LeastStale(SHAPE), SHAPE, slots)
    there: set[Key] = set()
    used: dict[Key, tuple[int, int]] = {}
    clock = 0
    for now, chosen in enumerate(passes):
        for layer, (number,) in zip(SHAPE.layers, chosen, strict=True):
            clock += 1
            key = (layer, number)
            assert cache.gate(layer, [number]) == [key in there]
            if key not in there and len(there) == slots:
                there.remove(first_to_go(there, used, now, layer))
            there.add(key)
            used[key] = (now, clock)
            assert {tuple(expert) for expert in cache.kept} == there


def test_what_is_coming_outlives_what_was_passed_by() -> None:
    """The difference from LRU: layer 5's expert of the last pass is wanted soon, layer 3's, used now, is not."""
    recency, staleness = Device(LRU(SHAPE), SHAPE, 3), Device(LeastStale(SHAPE), SHAPE, 3)
    for cache in (recency, staleness):
        cache.gate(1, [0])
        cache.gate(3, [0])
        cache.gate(5, [0])
        cache.gate(1, [1])  # the first layer's other expert: stale and behind in both
        cache.gate(3, [1])
    assert ExpertId(5, 0) in staleness.kept
    assert ExpertId(3, 0) not in staleness.kept


def test_passes_of_one_step_are_one() -> None:
    cache = Device(LeastStale(SHAPE), SHAPE, 3)
    cache.gate(5, [0], request=1)
    cache.gate(1, [0], request=1)
    cache.gate(1, [1], request=2)  # the same step: what request 1 has just used is current
    cache.gate(3, [0], request=1)
    assert ExpertId(5, 0) not in cache.kept
    assert {ExpertId(1, 0), ExpertId(1, 1)} <= set(cache.kept)
