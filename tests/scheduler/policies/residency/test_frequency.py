"""SMOE's cache against its rules, and AdapMoE's shares against exhaustive search and caches that were run."""

from __future__ import annotations

import itertools
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.errors import ConfigError
from scheduler.policies.residency.frequency import Frequent
from scheduler.policies.residency.sensitivity import LayerShares, fewest
from scheduler.policies.residency.shares import Shares
from scheduler.types import ExpertId, ModelShape, Visit
from support.scheduling.cache_driver import Device

SHAPE = ModelShape((0, 1), 8, 2)


def there(cache, layer: int) -> set[int]:
    return {expert.expert for expert, kept in cache.kept.items() if expert.layer == layer and kept}


def prefilled(slots: int, **options: int) -> tuple[Frequent, Device]:
    policy = Frequent(SHAPE, **options)
    cache = Device(policy, SHAPE, slots)
    cache.gate(0, {0: 1, 1: 4, 2: 2, 3: 3, 4: 1}, prefill=True)
    cache.gate(1, {0: 2, 5: 9, 6: 5, 7: 6}, prefill=True)
    return policy, cache


def test_filled_with_what_prefill_activated_most() -> None:
    policy, cache = prefilled(8)
    assert list(policy.share.values()) == [3, 3]
    assert list(policy.warm(8)) == [(1, 5), (1, 7), (1, 6), (0, 1), (0, 3), (0, 2)]
    assert cache.loads == 9
    cache.warm()
    assert (there(cache, 0), there(cache, 1)) == ({1, 2, 3}, {5, 6, 7})
    assert cache.loads == 9, "they stayed when prefill loaded them"


def test_what_prefill_loaded_before_its_gates_is_put_right() -> None:
    policy = Frequent(SHAPE)
    cache = Device(policy, SHAPE, 8)
    cache.predict(0, range(5))
    cache.gate(0, {0: 1, 1: 4, 2: 2, 3: 3, 4: 1}, prefill=True)
    assert there(cache, 0) == {0, 1, 2}
    cache.warm()
    assert there(cache, 0) == {1, 2, 3}
    assert cache.loads == 6


@settings(max_examples=30)
@given(
    st.integers(2, 15),
    st.lists(st.dictionaries(st.integers(0, 7), st.integers(1, 5), min_size=1), min_size=2, max_size=12),
)
def test_prefill_leaves_the_most_frequent_in_each_layer(slots: int, gates: list[dict[int, int]]) -> None:
    """Chunks of one prompt; what stays after warm() is a most frequent set, by counting."""
    policy = Frequent(SHAPE)
    cache = Device(policy, SHAPE, slots)
    counts: list[Counter[int]] = [Counter(), Counter()]
    for chunk, named in enumerate(gates):
        cache.gate(chunk % 2, named, prefill=True)
        counts[chunk % 2].update(named)
    cache.warm()
    for layer in (0, 1):
        share = policy.share[layer]
        stay = sorted((counts[layer][number] for number in there(cache, layer)), reverse=True)
        assert stay == sorted(counts[layer].values(), reverse=True)[:share]


def test_only_what_was_predicted_comes_in_for_the_least_frequent() -> None:
    policy, cache = prefilled(8)
    cache.warm()
    assert cache.gate(0, [0, 7]) == [False, False]
    assert there(cache, 0) == {1, 2, 3}, "loaded because the gate named them: they go again"
    cache.gate(1, [5, 6])
    cache.predict(0, [4, 5])
    assert there(cache, 0) == {1, 4, 5}, "in place of 2 (2 rows) and 3 (3)"
    assert cache.gate(0, [4, 5]) == [True, True]
    assert there(cache, 0) == {1, 4, 5}
    assert there(cache, 1) == {5, 6, 7}, "the other layer's are its own"
    assert (policy.activated(ExpertId(0, 4)), policy.activated(ExpertId(0, 5))) == (2, 1)
    cache.predict(0, [2])
    assert there(cache, 0) == {1, 2, 4}, "5 was activated once"


def test_a_named_expert_puts_out_nobody() -> None:
    policy, cache = prefilled(8)
    cache.warm()
    cache.gate(1, [5])
    wanted = ExpertId(0, 7)
    assert policy.full(wanted)
    policy.observed(Visit(0, 9, 0), {7: 1}, (), False)
    assert not policy.full(wanted)
    assert policy.victim(0, wanted, tuple(cache.idle)) is None
    policy.used(0, wanted, False, None)
    assert policy.full(wanted), "for the next token it may be predicted"


def test_the_next_prompt_counts_anew() -> None:
    _, cache = prefilled(8)
    cache.warm()
    cache.gate(0, {0: 1, 4: 2, 7: 3}, prefill=True, request=1)
    cache.gate(1, {0: 1}, prefill=True, request=1)
    cache.warm()
    assert there(cache, 0) == {0, 4, 7}
    assert 0 in there(cache, 1)


COSTS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4).map(lambda c: sorted(c, reverse=True)), max_size=4)


@given(COSTS, st.integers(0, 12))
def test_shares_cost_as_little_as_exhaustive_search_finds(costs: list[list[int]], slots: int) -> None:
    shares = fewest(costs, slots)
    assert sum(shares) == min(slots, sum(len(cost) - 1 for cost in costs))
    best = min(
        sum(cost[size] for cost, size in zip(costs, sizes, strict=True))
        for sizes in itertools.product(*[range(len(cost)) for cost in costs])
        if sum(sizes) <= slots
    )
    assert sum(cost[share] for cost, share in zip(costs, shares, strict=True)) == best


def test_what_a_greedy_choice_would_miss() -> None:
    """A loop over three experts gains nothing by two slots and all by three."""
    assert fewest([[10, 10, 10, 0], [10, 6, 3, 1]], 3) == [3, 0]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 7)), max_size=80))
def test_misses_at_every_size_are_those_of_lru_caches_that_were_run(asked: list[tuple[int, int]]) -> None:
    policy = LayerShares(SHAPE, period=10_000)
    for layer, number in asked:
        policy.observed(Visit(0, 0, layer), {number: 1}, (), False)
    for layer in (0, 1):
        own = [number for of, number in asked if of == layer]
        for size in range(9):
            misses = 0
            for i, number in enumerate(own):
                recent = list(dict.fromkeys(reversed(own[:i])))
                misses += number in recent and number not in recent[:size]
            assert policy.missed(layer)[size] == misses


def test_predicted_loads_weigh_less() -> None:
    policy = LayerShares(SHAPE)
    for layer in (0, 1):
        for number in (0, 1, 0, 1):
            policy.observed(Visit(0, 0, layer), {number: 1}, (), False)
    assert policy.missed(0) == policy.missed(1)
    for _ in range(3):
        policy.keeps(0, ExpertId(0, 0), True)
        policy.used(0, ExpertId(0, 0), False, None)
        policy.keeps(0, ExpertId(1, 0), False)
        policy.used(0, ExpertId(1, 0), False, None)
    assert policy.missed(0)[0] == pytest.approx(policy.missed(1)[0] / 4), "1 of 1 + 3 loads, smoothed, was not foretold"
    policy.used(0, ExpertId(0, 0), True, None)
    assert policy.missed(0)[0] == pytest.approx(policy.missed(1)[0] / 4), "a hit is no load"


def test_a_layer_that_gains_more_gets_more() -> None:
    """Layer 0 wants any of eight, layer 1 one of five by turns: LRU gains nothing by one slot more there, until it has
    five. Against the same cache with equal shares."""
    draw = Random(5)
    asked = [(draw.randrange(8), turn % 5) for turn in range(400)]
    hits = {}
    for policy in (Shares(SHAPE), LayerShares(SHAPE, period=16)):
        cache = Device(policy, SHAPE, 9)
        hits[type(policy)] = sum(cache.gate(0, [a])[0] + cache.gate(1, [b])[0] for a, b in asked)
    assert list(policy.share.values()) == [2, 5]
    assert hits[LayerShares] > 1.5 * hits[Shares]


def test_older_counts_weigh_half() -> None:
    policy = LayerShares(SHAPE, period=4)
    policy.check(SHAPE, 6)
    for _ in range(4):  # the fourth pass begins with the renewal: 2 uses after the first, halved, and one more
        policy.observed(Visit(0, 0, 0), {5: 1}, (), False)
    assert policy.missed(0) == [2.0] + [0.0] * 8


def test_prefill_is_not_measured() -> None:
    policy = LayerShares(SHAPE, period=1)
    policy.check(SHAPE, 6)
    for _ in range(3):
        policy.observed(Visit(0, 0, 0), dict.fromkeys(range(8), 1), (), True)
    assert policy.missed(0) == [0.0] * 9
    assert list(policy.share.values()) == [2, 2]


def test_the_period_must_be_some() -> None:
    with pytest.raises(ConfigError, match="shares-period is 0; allowed: 1"):
        LayerShares(SHAPE, period=0)
