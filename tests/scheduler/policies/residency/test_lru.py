"""LRU, LFU and the hot set against brute force; shares of layers; and all residencies, told things in any order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policies.baselines.adapmoe import LayerShares
from scheduler.policies.guard import methods_of
from scheduler.policies.precision import FULL
from scheduler.policies.registry import RESIDENCIES
from scheduler.policies.residency.arc import ARC, ShallowARC
from scheduler.policies.residency.base import ChosenByGates, Residency, kept_slots
from scheduler.policies.residency.frequency import Frequent
from scheduler.policies.residency.lru import LFU, LRU, Static
from scheduler.policies.residency.shares import Shares, equal_shares
from scheduler.policies.system_config import SystemConfig
from scheduler.types import ExpertId, ModelShape, Visit
from support.scheduling.cache_driver import Device
from support.worlds.plan import Plan, choosing_plan
from support.worlds.world import live

SHAPE = ModelShape((1, 3, 5), 4, 2)
KEYS = st.tuples(st.sampled_from(SHAPE.layers), st.integers(0, 3))
ALL = {name: choice for name, choice in RESIDENCIES.items() if name not in ("none", "all")}
each_policy = pytest.mark.parametrize(
    "policy", [partial(choice.make, c=SystemConfig(residency=name)) for name, choice in ALL.items()], ids=list(ALL)
)


@settings(max_examples=50)
@given(st.integers(1, 8), st.lists(KEYS, max_size=100))
def test_lru_against_brute_force(slots: int, asked: list[tuple[int, int]]) -> None:
    cache = Device(LRU(SHAPE), SHAPE, slots)
    for i, key in enumerate(asked):
        before = list(dict.fromkeys(reversed(asked[:i])))
        assert cache.gate(key[0], [key[1]]) == [key in before[:slots]]


@settings(max_examples=50)
@given(st.integers(1, 8), st.lists(KEYS, max_size=100))
def test_lfu_against_brute_force(slots: int, asked: list[tuple[int, int]]) -> None:
    cache = Device(LFU(SHAPE), SHAPE, slots)
    there: set[tuple[int, int]] = set()
    for i, key in enumerate(asked):
        assert cache.gate(key[0], [key[1]]) == [key in there]
        if key not in there and len(there) == slots:
            uses = Counter(asked[:i])
            last = {used: j for j, used in enumerate(asked[:i])}
            there.remove(min(there, key=lambda old: (uses[old], last[old])))
        there.add(key)


def test_rows_are_one_use() -> None:
    cache = Device(LFU(SHAPE), SHAPE, 2)
    cache.gate(1, {0: 9})
    cache.gate(1, [1])
    cache.gate(1, [1])
    cache.gate(1, [2])
    assert set(cache.kept) == {(1, 1), (1, 2)}


def test_a_predicted_load_is_not_the_next_to_go() -> None:
    cache = Device(LRU(SHAPE), SHAPE, 3)
    cache.gate(1, [0])
    cache.gate(1, [1])
    cache.predict(3, [2])
    cache.gate(3, [3])  # not the one that was predicted
    assert set(cache.kept) == {(1, 1), (3, 2), (3, 3)}


def test_the_hot_set_is_the_first_prefills() -> None:
    policy = Static(SHAPE)
    cache = Device(policy, SHAPE, 5)
    cache.gate(1, {0: 1, 1: 5, 2: 2, 3: 2}, prefill=True)
    cache.gate(3, {0: 4, 3: 6}, prefill=True)
    cache.gate(5, {1: 9, 2: 1}, prefill=True)
    cache.warm()
    assert policy.hot == ((5, 1), (3, 3), (1, 1))
    assert set(policy.hot) <= set(cache.kept)
    cache.gate(1, [0, 2])  # what prefill has left in the other two slots goes
    loads = cache.loads
    for _ in range(3):
        assert cache.gate(1, [0, 1]) == [False, True]
        assert cache.gate(3, [0, 3]) == [False, True]
        assert cache.gate(5, [1, 2]) == [True, False]
    assert cache.loads == loads + 9, "the others are loaded each time"
    cache.gate(1, {2: 50}, prefill=True, request=1)
    cache.warm()
    assert policy.hot == ((5, 1), (3, 3), (1, 1)), "a second prompt changes nothing"
    policy.check(SHAPE, 4)
    assert policy.hot == ((5, 1), (3, 3))


def test_without_a_prefill_the_hot_set_is_still_open() -> None:
    cache = Device(Static(SHAPE), SHAPE, 3)
    cache.warm()
    cache.gate(1, [0])
    assert cache.gate(1, [0]) == [True]


@pytest.mark.parametrize(
    ("slots", "counts", "expected"),
    [
        (0, [4, 4], [0, 0]),
        (5, [4, 4, 4], [2, 2, 1]),
        (9, [1, 8, 2], [1, 6, 2]),
        (99, [1, 8, 2], [1, 8, 2]),
        (3, [], []),
        (2, [0, 3], [0, 2]),
    ],
)
def test_equal_shares(slots: int, counts: list[int], expected: list[int]) -> None:
    assert equal_shares(slots, counts) == expected


@given(st.integers(0, 60), st.lists(st.integers(0, 9), max_size=8))
def test_equal_shares_are_as_equal_as_counts_allow(slots: int, counts: list[int]) -> None:
    shares = equal_shares(slots, counts)
    assert sum(shares) == min(slots, sum(counts))
    assert all(share <= count for share, count in zip(shares, counts, strict=True))
    open_ = [share for share, count in zip(shares, counts, strict=True) if share < count]
    assert not open_ or max(shares) <= min(open_) + 1


@pytest.mark.parametrize(("slots", "passing", "kept"), [(12, 2, 12), (11, 2, 9), (3, 2, 2), (1, 2, 1), (6, 0, 6)])
def test_slots_that_nobody_stays_in(slots: int, passing: int, kept: int) -> None:
    assert kept_slots(SHAPE, slots, passing) == kept


@settings(max_examples=50)
@given(st.integers(4, 11), st.lists(KEYS, max_size=100))
def test_a_share_is_an_lru_of_its_own(slots: int, asked: list[tuple[int, int]]) -> None:
    """As mixtral-offloading has it: whatever other layers do."""
    policy = Shares(SHAPE)
    cache = Device(policy, SHAPE, slots)
    for i, key in enumerate(asked):
        before = list(dict.fromkeys(used for used in reversed(asked[:i]) if used[0] == key[0]))
        assert cache.gate(key[0], [key[1]]) == [key in before[: policy.share[key[0]]]]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["gate", "gate", "predict", "prefill", "warm"]),
        st.integers(0, 2),
        st.sets(st.integers(0, 3), min_size=1, max_size=3),
    ),
    max_size=40,
)


@each_policy
@settings(max_examples=20)
@given(slots=st.integers(1, 12), steps=STEPS)
def test_on_a_device(
    policy: Callable[[ModelShape], Residency], slots: int, steps: list[tuple[str, int, set[int]]]
) -> None:
    """Every gate is served, never more is held than there are slots, and never more of a layer than its share."""
    made = policy(SHAPE)
    cache = Device(made, SHAPE, slots)
    for kind, ordinal, experts in steps:
        layer = SHAPE.layers[ordinal]
        if kind == "predict":
            cache.predict(layer, sorted(experts))
        elif kind == "warm":
            if not cache.foretold:
                cache.warm()
        else:
            cache.gate(layer, experts, prefill=kind == "prefill")
        assert len(cache.kept) <= slots
        if isinstance(made, Shares):
            stay = Counter(expert.layer for expert, kept in cache.kept.items() if kept)
            assert all(stay[layer] <= share for layer, share in made.share.items())
            assert made.kept == {
                layer: {e for e, kept in cache.kept.items() if kept and e.layer == layer} for layer in SHAPE.layers
            }
            assert sum(made.share.values()) <= slots
    if slots == 12 and not isinstance(made, Static | Frequent):
        for layer in SHAPE.layers:
            cache.gate(layer, range(4))
        assert all(all(cache.gate(layer, range(4))) for layer in SHAPE.layers), "with a slot for each nobody ever goes"


@pytest.mark.parametrize("policy", [Shares, ShallowARC, LayerShares])
def test_shares_that_shrink_are_kept_to_again(policy: Callable[[ModelShape], Shares]) -> None:
    shape = ModelShape((1, 3, 5), 8, 2)
    made = policy(shape)
    cache = Device(made, shape, 14)
    for layer in shape.layers:
        for first in (0, 2, 4):
            cache.gate(layer, [first, first + 1])
    assert sum(len(kept) for kept in made.kept.values()) >= 10
    made.check(shape, 8)
    assert 4 <= sum(made.share.values()) <= 6
    for turn in range(4):
        for layer in shape.layers:
            there = {expert.expert for expert in made.kept[layer]}
            cache.gate(layer, sorted(set(range(8)) - there)[turn : turn + 2])
    assert all(len(made.kept[layer]) <= share for layer, share in made.share.items())
    assert sum(len(kept) for kept in made.kept.values()) > 0


def test_who_makes_room_where_layers_have_shares() -> None:
    made = Shares(SHAPE)
    made.check(SHAPE, 8)  # two of them pass
    held = [ExpertId(1, 0), ExpertId(1, 1), ExpertId(3, 0)]
    assert all(made.keeps(0, expert, False) for expert in held)
    assert not made.full(ExpertId(3, 1))
    assert made.victim(0, ExpertId(1, 2), held) == ExpertId(1, 0), "its own layer's least recently used"
    assert made.victim(0, ExpertId(1, 2), held[2:]) is None, "no other layer's"
    made.check(SHAPE, 5)
    assert made.victim(0, ExpertId(5, 0), held[::-1]) == ExpertId(1, 0), "a layer has more than its share now"
    assert made.victim(0, ExpertId(5, 0), held[2:]) is None, "it waits: a slot comes free"
    made.keeps(1, ExpertId(5, 1), False)
    made.on_left(1, ExpertId(5, 1))
    assert made.victim(0, ExpertId(5, 0), held[2:]) == ExpertId(3, 0), (
        "several workers: this one's slots may hold no other"
    )


@pytest.mark.slow
@each_policy
def test_in_the_cores_random_world(policy: Callable[[ModelShape], Residency]) -> None:
    """Failing loads, workers lost and won, several requests, wrong predictions: the referee finds nothing wrong, and in
    the end the policy knows who is there."""
    hits = 0
    for seed in (1, 3, 6, 7):  # in those between, nothing is kept
        made: list[Residency] = []

        def make(plan: Plan, made: list[Residency] = made) -> Residency:
            made.append(policy(plan.shape))
            return made[-1]

        lived = live(replace(choosing_plan(seed), policy="quota"), make)
        there = {attempt.load.expert for attempt in lived.referee.books.slots.values() if attempt.keeps}
        if isinstance(made[0], Shares):
            assert {expert for kept in made[0].kept.values() for expert in kept} == there
        if isinstance(made[0], ARC):
            assert {*made[0].lists.t1, *made[0].lists.t2} == there
        hits += sum(stats.reused for stats in lived.core.stats.values())
    assert hits > 20


EXPERTS = st.builds(ExpertId, st.sampled_from(SHAPE.layers), st.integers(0, 3))
SCORES = st.lists(st.tuples(*[st.floats(0, 1)] * 4), max_size=3).map(tuple)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("check"), st.integers(0, 14)),
        st.tuples(st.just("keeps"), st.integers(0, 2), EXPERTS, st.booleans()),
        st.tuples(st.just("observed"), st.integers(0, 2), EXPERTS, SCORES, st.booleans()),
        st.tuples(st.just("used"), st.integers(0, 2), EXPERTS, st.booleans()),
        st.tuples(st.just("left"), st.integers(0, 2), EXPERTS),
        st.tuples(st.just("victim"), st.integers(0, 2), EXPERTS, st.sets(EXPERTS, min_size=1)),
        st.tuples(st.just("warm"), st.integers(0, 14)),
    ),
    max_size=60,
)


@each_policy
@settings(max_examples=20)
@given(calls=CALLS)
def test_told_things_in_any_order(policy: Callable[[ModelShape], Residency], calls: list[tuple]) -> None:
    """Loads that fail, experts that leave unused, uses of what never came, three workers: answers stay within what was
    asked."""
    made = policy(SHAPE)
    for name, *said in calls:
        if name == "check":
            made.check(SHAPE, said[0])
        elif name == "keeps":
            assert made.keeps(*said) in (True, False)
        elif name == "observed":
            request, (layer, expert), scores, prefill = said
            made.on_gate_fired(Visit(request, 0, layer), {expert: 1}, scores, prefill)
        elif name == "used":
            made.on_used(*said, FULL)
        elif name == "left":
            made.on_left(*said)
        elif name == "victim":
            worker, wanted, evictable = said
            assert made.full(wanted) in (True, False)
            assert made.victim(worker, wanted, sorted(evictable)) in {None, *evictable}
        else:
            warm = list(made.warm(said[0]))
            assert len(warm) <= said[0]
            assert len(set(warm)) == len(warm)


def test_what_a_gate_has_chosen() -> None:
    chosen = ChosenByGates()
    chosen.on_gate_fired(Visit(1, 0, 3), [0, 2])
    assert ExpertId(3, 0) in chosen
    assert ExpertId(3, 1) not in chosen
    chosen.on_used(ExpertId(3, 0))
    assert ExpertId(3, 0) not in chosen
    chosen.on_gate_fired(Visit(2, 0, 3), [2])
    chosen.on_used(ExpertId(3, 2))
    assert ExpertId(3, 2) in chosen, "the other request still waits for it"
    chosen.on_gate_fired(Visit(1, 0, 5), [1])
    chosen.on_gate_fired(Visit(2, 0, 5), [1])
    assert ExpertId(3, 2) not in chosen, "a later gate: that layer is over"
    for request in range(10, 40):
        chosen.on_gate_fired(Visit(request, 0, 1), [0])
    assert ExpertId(5, 1) not in chosen, "requests that are heard of no more are forgotten"


@each_policy
def test_each_has_what_the_core_calls(policy: Callable[[ModelShape], Residency]) -> None:
    assert all(callable(getattr(policy(SHAPE), name)) for name in methods_of(Residency))
    assert isinstance(policy(SHAPE).has_homes, bool)
