"""The core in random worlds: whatever comes, and whenever, the referee (`referee.py`) must find nothing wrong.

It checks every command when it is given (nothing follows from a gate before all of the step's have fired, loads go only
into free slots of live workers and never of what is there, every row of every named expert is computed exactly once,
nothing is evicted that a pass needs), after every fact that no expert is held for nobody and none waits for no reason,
and at the end that every layer was resumed in time, or its request failed with a reason (workers were missing for too
long, or an expert failed too often), that nothing is left, and that the core's figures agree with its own. Thousands of
worlds are in test_many_worlds.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import event, given, settings

from scheduler import types as t
from scheduler.core.stats import RequestStats
from scheduler.policies.registry import RESIDENCIES
from support.worlds.drawn_plans import plans
from support.worlds.plan import (
    BLIP,
    LOST,
    POLICIES,
    PREDICTORS,
    PREFILLS,
    Plan,
    Poison,
    choosing_plan,
    deadly_plan,
    eventful_plan,
    parted_plan,
    random_plan,
    roomy,
    stepping_plan,
)
from support.worlds.worker import NBYTES
from support.worlds.world import World, live

SETTINGS = settings(max_examples=8)


@SETTINGS
@given(plan=plans())
def test_whatever_happens_the_referee_finds_nothing_wrong(plan: Plan) -> None:
    seen = live(roomy(plan) if plan.stay and plan.seed % 8 else plan).referee.seen
    for what in sorted(+seen):
        event(what)


@SETTINGS
@given(plan=plans())
def test_without_losses_and_failures_every_request_is_answered(plan: Plan) -> None:
    quiet = tuple(fault for fault in plan.faults if fault[1].startswith("shadow"))
    plan = replace(plan, failing=0.0, faults=quiet)
    seen = live(roomy(plan) if plan.stay else plan).referee.seen
    assert not seen["failed: too few slots"]
    assert not seen["failed: too often"]
    assert not seen["failed: no worker"]
    assert not seen["closed in a layer"]


@pytest.mark.parametrize(
    "plan",
    [
        eventful_plan(6718),  # a failed prediction, replaced by another before its gate
        choosing_plan(12993),
        replace(eventful_plan(5995), policy="layer-lru"),  # a victim, and another copy of its expert that may not stay
    ],
    ids=["eventful 6718", "choosing 12993", "eventful 5995 layer-lru"],
)
def test_worlds_that_once_were_wrong(plan: Plan) -> None:
    live(plan)


@pytest.mark.slow
def test_every_request_ends_whatever_workers_die_of() -> None:
    """They die of an expert, or within ticks, and always come back. Nothing but the core ends a request."""
    for seed in range(16):
        live(deadly_plan(seed))


@pytest.mark.parametrize("seed", range(6))
def test_a_poison_of_one_request_fails_no_other(seed: int) -> None:
    poison = Poison(1, seed % 3, request=1)
    plan = Plan(seed=seed, slots=(1, 2), experts=3, requests=4, returning=1.0, patience=100_000, poison=poison)
    world = live(replace(plan, prefill=PREFILLS[seed % 3]))
    answered = [number for number, main in world.mains.items() if main.position == plan.prompt + plan.answer]
    assert set(answered) >= {2, 3, 4}


# --- what random worlds must reach, else the tests above would prove little -------------------------------------------


OF_STEPS = {
    "step of several",
    "gate held",
    "needed by several",
    "left after several passes",
    "prefill beside decoding",
    "block",
    "row read again",
    "not in the step",
    "several prefetches wait",
    "replaced prediction",
}
LEFT_STEPS = {"united by a departure", "closed between gates"}


def reached(make: Callable[[int], Plan], worlds: int) -> Counter[str]:
    """In how many worlds each thing has happened."""
    runs: Counter[str] = Counter()
    for seed in range(worlds):
        runs.update((+live(make(seed)).referee.seen).keys())
    return runs


@pytest.mark.slow
def test_worlds_with_od_moes_choices_reach_every_branch_that_is_hard() -> None:
    runs = reached(random_plan, 36)
    often = {
        "reload",
        "predicted, loaded late",
        "pre-empted",
        "unused",
        "late prediction",
        "second prediction",
        "stall",
        "several chunks",
        "stale fact",
        "load failed",
        "compute failed",
        "recall between 0 and 1",
        "unpredicted",
        "put off",
        "two on a link",
        "form full",
        "shared",
        "hits",
        "computed where it was",
        "clear",
    }
    rare = {
        "lost while idle",
        "lost while loading",
        "lost while computing",
        "joined late",
        "closed in a layer",
        "shadow lost",
        "failed: no worker",
        "failed: too often",
        "waited for workers",
        "waited in a layer",
        "waited for nothing",
    }
    assert set(runs) - {"suspects wait"} == often | rare | OF_STEPS | {"united by a departure"}
    assert {what: runs[what] for what in often if runs[what] < 4} == {}
    assert {what: runs[what] for what in rare if runs[what] < 2} == {}


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted({*RESIDENCIES, *POLICIES}))
def test_all_workers_are_lost_at_any_moment_and_come_back_every_request_is_answered(policy: str) -> None:
    waited = 0
    for seed in range(5):
        prefill = PREFILLS[seed % 3]
        rng = Random(f"{policy} {prefill} {seed}")
        plan = Plan(
            seed=seed,
            slots=(2, 1, 3, 0) if seed % 4 else (1, 2),
            mini_batch=2,
            requests=2,
            answer=4,
            faults=((rng.randint(0, 200), BLIP, 0),),
            policy=policy,
            predictor=rng.choice(PREDICTORS),
            prefill=prefill,
            placement=seed % 2 == 0,
            chunk=(seed + seed // 3) % 3,
            block=1 + seed % 2,
            returning=1.0,
            patience=LOST + 10,
        )
        world = live(roomy(plan) if plan.stay else plan)
        assert all(main.position == plan.prompt + plan.answer for main in world.mains.values())
        waited += world.referee.seen["waited in a layer"] > 0
    assert waited > 1


@pytest.mark.slow
def test_worlds_of_several_requests_reach_every_branch_that_is_hard() -> None:
    runs = reached(stepping_plan, 44)
    assert {what: runs[what] for what in OF_STEPS if runs[what] < 8} == {}
    assert {what: runs[what] for what in (*LEFT_STEPS, "closed in a layer") if runs[what] < 2} == {}


@pytest.mark.parametrize("seed", range(8))
def test_a_store_in_parts(seed: int) -> None:
    """If nothing fails, every request is answered."""
    plan = parted_plan(seed)
    live(plan)
    quiet = replace(plan, failing=0.0, faults=(), patience=0)
    seen = live(roomy(quiet) if quiet.stay else quiet).referee.seen
    assert not any(what.startswith("failed:") for what in +seen)


@pytest.mark.slow
def test_worlds_of_a_store_in_parts_reach_every_branch_that_is_hard() -> None:
    runs = reached(parted_plan, 80)
    expected = {"part changed": 15, "failed: nobody holds it": 2, "failed: no worker": 3, "computed by a host": 3}
    assert {what: runs[what] for what, count in expected.items() if runs[what] < count} == {}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_eight_requests_go_on_with_one_slot(seed: int) -> None:
    """A layer needs more experts than there are slots. Nothing fails, so the referee also says by when it is over."""
    plan = Plan(seed=seed, slots=(1,), group=1, experts=8, top_k=3, requests=8, block=1 + seed, chunk=seed % 4)
    world = live(replace(plan, prefill=PREFILLS[seed]))
    assert world.referee.seen["needed by several"] > 10
    assert all(main.position == plan.prompt + plan.answer for main in world.mains.values())


@pytest.mark.parametrize("seed", range(4))
def test_shared_loads_are_fewer(seed: int) -> None:
    """Eight requests in lock-step, without predictions: at most one load for each expert of each layer of a step."""
    plan = Plan(seed=seed, slots=(2, 1), experts=8, top_k=2, requests=8, prompt=1, shadow=False, arrive=0, answer=5)
    stats = live(replace(plan, prefill="pipelined")).core.stats.values()
    steps = 2 * (1 + 5)  # the first may begin before all have arrived
    assert sum(one.loads for one in stats) <= steps * plan.layers * plan.experts
    assert sum(one.loads + one.reused for one in stats) == 8 * (1 + 5) * plan.layers * plan.top_k
    assert sum(one.reused for one in stats) > sum(one.loads for one in stats)


@pytest.mark.slow
def test_worlds_with_any_choices_reach_every_branch_that_is_hard() -> None:
    runs = reached(eventful_plan, 80)
    expected = {
        "computed where it was": 30,
        "shared": 15,
        "loaded in turn": 10,
        "failed: too few slots": 1,
        "reload": 30,
        "load failed": 10,
        "compute failed": 10,
        "lost while computing": 2,
        "stall": 30,
        "several chunks": 10,
        "closed in a layer": 1,
        "recall between 0 and 1": 30,
        "pre-empted": 30,
        "unused": 20,
        "victim": 20,
        "warm": 7,
        "warmed": 5,
        "first of the idle": 5,
        "computed by a host": 8,
        "host failed": 2,
        "host lost at work": 1,
        "routed": 10,
        "form int4": 7,
        "brings others": 20,
        "late prediction": 25,
        "clear": 5,
        "put off": 30,
        "waited in a layer": 3,
        "waited for nothing": 3,
    }
    assert {what: runs[what] for what, least in expected.items() if runs[what] < least} == {}


# --- policies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_what_stays_is_loaded_once_whatever_the_slots(seed: int) -> None:
    """Uneven workers, several requests, nothing lost: no expert is loaded twice, so there are at most as many loads."""
    plan = Plan(
        seed=seed, slots=(1, 3, 2, 5), group=2, layers=5, experts=6, top_k=2, requests=3, answer=5, policy="all"
    )
    core = live(roomy(plan)).core
    loads = sum(one.loads for one in core.stats.values())
    hits = sum(one.reused for one in core.stats.values())
    preempted = sum(one.preempted for one in core.stats.values())
    assert sum(one.bytes_loaded for one in core.stats.values()) <= 5 * 6 * NBYTES
    assert loads <= 5 * 6 + preempted
    assert hits >= 3 * 5 * 5 * 2 - loads


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "even", "quota"])
def test_policies_that_evict_never_leave_anybody_waiting(policy: str) -> None:
    """Whatever fails and whoever is lost: every request is answered or fails with a reason."""
    seen: Counter[str] = Counter()
    for seed in range(6, 12):  # in those before, little is kept
        seen += live(replace(choosing_plan(seed), policy=policy)).referee.seen
    assert seen["hits"] > 250
    assert seen["victim"] > 45


@pytest.mark.parametrize("policy", sorted(set(RESIDENCIES) - {"none", "all"}))
def test_the_policies_of_systems_never_leave_anybody_waiting(policy: str) -> None:
    """On one to three workers, with host places, failures and losses; the referee's books must agree."""
    hits = 0
    for seed in range(8):
        rng = Random(f"{policy}{seed}")
        slots = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 3)))
        slots = (*slots, 0) if rng.random() < 0.3 else slots
        hits += live(replace(eventful_plan(seed), policy=policy, slots=slots)).referee.seen["hits"]
    assert hits > 25


# --- predictions ------------------------------------------------------------------------------------------------------


def right_predictions(**fields: Any) -> RequestStats:
    """One request, a shadow far ahead that is always right, eight workers in groups of two."""
    plan = Plan(slots=(1,) * 8, group=2, layers=8, experts=8, top_k=2, prompt=4, answer=6, accuracy=1.0, predict=0)
    return live(replace(plan, **fields)).core.stats[1]


@pytest.mark.parametrize("seed", range(4))
def test_a_perfect_shadow_reloads_nothing(seed: int) -> None:
    stats = right_predictions(seed=seed, main=40, load=1, compute=1, latency=0)
    # One prediction in twenty never comes; every other one is right.
    assert stats.overall.recall == 1.0
    assert stats.unpredicted < 0.2 * stats.overall.activated
    assert stats.reloads == stats.unpredicted + 2 * stats.late


@pytest.mark.parametrize("seed", range(4))
def test_workers_that_load_faster_than_the_main_node_works_never_stall_it(seed: int) -> None:
    """Without a shadow the same world stalls at every layer whose load takes any time at all."""
    fast = right_predictions(seed=seed, main=40, load=0, compute=1, latency=0)
    assert fast.stall_s == 0
    alone = right_predictions(seed=seed, main=40, load=10, compute=1, latency=0, shadow=False)
    assert alone.reloads == 6 * 8 * 2
    assert alone.stall_s > 6 * 8 * 10 / 2


# --- the referee itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoil", ["forgotten", "given twice"])
@pytest.mark.parametrize("what", [t.Load, t.Compute, t.Evict, t.Resume, t.Route])
def test_the_referee_is_not_asleep(monkeypatch: pytest.MonkeyPatch, what: type, spoil: str) -> None:
    """A core that once forgets a command of a kind, or gives it twice, is caught."""
    world = World(Plan(seed=1, accuracy=0.5, predictor="attention", router=True))
    handle, done = world.core.handle, []

    def spoilt(event: t.Event, now: float) -> list[t.Command]:
        commands = handle(event, now)
        first = next((place for place, c in enumerate(commands) if isinstance(c, what)), None)
        if first is None or done:
            return commands
        done.append(commands[first])
        again = [commands[first]] if spoil == "given twice" else []
        return [*commands[:first], *again, *again, *commands[first + 1 :]]

    monkeypatch.setattr(world.core, "handle", spoilt)
    with pytest.raises((AssertionError, KeyError)):
        world.run()
    assert done
