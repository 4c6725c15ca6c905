"""AdapMoE: its rule for two experts, its shares against exhaustive search and caches that were run."""

from __future__ import annotations

import itertools
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policies.baselines.adapmoe import LayerShares, Skip, cheapest_shares
from scheduler.policies.precision import FULL
from scheduler.policies.residency.measured_shares import PERIOD
from scheduler.policies.residency.shares import Shares
from scheduler.types import ExpertId, ModelShape, Visit
from support.scheduling.cache_driver import Device
from support.scheduling.forecasts import best

SHAPE = ModelShape((0, 1), 8, 2)
QUARTERS = st.sampled_from([0.25, 0.5, 0.75, 1.0])  # exact in binary, so thresholds can be met exactly


def top(row: tuple[float, ...], k: int) -> tuple[int, ...]:
    return tuple(best(row, k))


@given(st.floats(0.01, 1), st.floats(0.01, 1), st.floats(0, 1))
def test_of_two_the_second_is_skipped_where_its_part_is_below_the_threshold(a: float, b: float, limit: float) -> None:
    """AdapMoE: `if routing_weights[1] < threshold`, weights normalised over the two."""
    share = min(a, b) / (a + b)
    if abs(share - limit) < 1e-9:
        return
    chosen = (1, 2) if a >= b else (2, 1)
    routed = Skip(limit).route((chosen,), ((0.0, a, b, 0.0),), ())
    assert routed == ((chosen[:1],) if share < limit else (chosen,))


@given(st.lists(st.integers(1, 16), min_size=1, max_size=6), QUARTERS)
def test_as_many_are_skipped_as_weigh_less_than_the_threshold_together(scores: list[int], threshold: float) -> None:
    row = tuple(float(s) for s in scores)
    chosen = top(row, len(row))
    kept = Skip(threshold).route((chosen,), (row,), ())[0]
    light = [n for n in range(len(row)) if sum(sorted(scores)[:n]) < Fraction(threshold) * sum(scores)]
    assert kept == chosen[: len(row) - max([*light, 0])]
    assert kept


@pytest.mark.parametrize("row", [(0.2, 0.1), (0.6, 0.2), (0.7, 0.5, 0.4)])
def test_the_best_stays_whatever_rounding_leaves_of_the_threshold(row: tuple[float, ...]) -> None:
    """At threshold 1 all may go but the best; 0.2 + 0.1 less both is 2.8e-17, not nought."""
    assert Skip(1.0).route((top(row, len(row)),), (row,), ()) == ((0,),)


def test_a_threshold_of_0_is_exact() -> None:
    assert Skip(0).exact
    assert not Skip(0.1).exact


COSTS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4).map(lambda c: sorted(c, reverse=True)), max_size=4)


@given(COSTS, st.integers(0, 12))
def test_shares_cost_as_little_as_exhaustive_search_finds(costs: list[list[int]], slots: int) -> None:
    shares = cheapest_shares(costs, slots)
    assert sum(shares) == min(slots, sum(len(cost) - 1 for cost in costs))
    best = min(
        sum(cost[size] for cost, size in zip(costs, sizes, strict=True))
        for sizes in itertools.product(*[range(len(cost)) for cost in costs])
        if sum(sizes) <= slots
    )
    assert sum(cost[share] for cost, share in zip(costs, shares, strict=True)) == best


def test_what_a_greedy_choice_would_miss() -> None:
    """A loop over three experts gains nothing by two slots and all by three."""
    assert cheapest_shares([[10, 10, 10, 0], [10, 6, 3, 1]], 3) == [3, 0]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 7)), max_size=31))
def test_misses_at_every_size_are_those_of_lru_caches_that_were_run(asked: list[tuple[int, int]]) -> None:
    policy = LayerShares(SHAPE)
    for layer, number in asked:
        policy.on_gate_fired(Visit(0, 0, layer), {number: 1}, (), False)
    for layer in (0, 1):
        own = [number for of, number in asked if of == layer]
        for size in range(9):
            misses = 0
            for i, number in enumerate(own):
                recent = list(dict.fromkeys(reversed(own[:i])))
                misses += number in recent and number not in recent[:size]
            assert policy.expected_misses(layer)[size] == misses


def test_predicted_loads_weigh_less() -> None:
    policy = LayerShares(SHAPE)
    for layer in (0, 1):
        for number in (0, 1, 0, 1):
            policy.on_gate_fired(Visit(0, 0, layer), {number: 1}, (), False)
    assert policy.expected_misses(0) == policy.expected_misses(1)
    for _ in range(3):
        policy.keeps(0, ExpertId(0, 0), True)
        policy.on_used(0, ExpertId(0, 0), False, FULL)
        policy.keeps(0, ExpertId(1, 0), False)
        policy.on_used(0, ExpertId(1, 0), False, FULL)
    assert policy.expected_misses(0)[0] == pytest.approx(policy.expected_misses(1)[0] / 4), (
        "1 of 1 + 3 loads, smoothed, was not foretold"
    )
    policy.on_used(0, ExpertId(0, 0), True, FULL)
    assert policy.expected_misses(0)[0] == pytest.approx(policy.expected_misses(1)[0] / 4), "a hit is no load"


def test_a_layer_that_gains_more_gets_more() -> None:
    """Layer 0 wants any of eight, layer 1 one of five by turns: LRU gains nothing by one slot more there, until it has
    five. Against the same cache with equal shares."""
    draw = Random(5)
    asked = [(draw.randrange(8), turn % 5) for turn in range(400)]
    hits = {}
    for policy in (Shares(SHAPE), LayerShares(SHAPE)):
        cache = Device(policy, SHAPE, 9)
        hits[type(policy)] = sum(cache.gate(0, [a])[0] + cache.gate(1, [b])[0] for a, b in asked)
    assert list(policy.share.values()) == [2, 5]
    assert hits[LayerShares] > 1.5 * hits[Shares]


def test_older_counts_weigh_half() -> None:
    policy = LayerShares(SHAPE)
    policy.check(SHAPE, 6)
    for _ in range(PERIOD):  # the last begins with the allocation: 30 uses after the first, halved, and one more
        policy.on_gate_fired(Visit(0, 0, 0), {5: 1}, (), False)
    assert policy.expected_misses(0) == [(PERIOD - 2) / 2 + 1] + [0.0] * 8


def test_prefill_is_not_measured() -> None:
    policy = LayerShares(SHAPE)
    policy.check(SHAPE, 6)
    for _ in range(PERIOD):
        policy.on_gate_fired(Visit(0, 0, 0), dict.fromkeys(range(8), 1), (), True)
    assert policy.expected_misses(0) == [0.0] * 9
    assert list(policy.share.values()) == [2, 2]
