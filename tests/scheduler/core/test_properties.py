"""The core in a random world: whatever comes, and whenever, the referee of core_world.py must find nothing wrong.

It checks every command when it is given (loads only into free slots of live workers, every row of every named expert
computed exactly once, evictions only of what nobody needs), after every fact that no expert is held for nobody and none
waits for no reason, and at the end that every layer was resumed, or its request failed with a reason, that nothing is
left, and that the ledgers agree with its own books.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from scheduler.policies.registry import RESIDENCIES

SETTINGS = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
FAULTS = st.tuples(
    st.integers(0, 400), st.sampled_from(["die", "join", "cancel", "shadow-lost", "shadow-join"]), st.integers(0, 11)
)


@st.composite
def plan_fields(draw: st.DrawFn) -> dict[str, Any]:
    experts = draw(st.integers(1, 8))
    return {
        "seed": draw(st.integers(0, 10_000)),
        "slots": (draw(st.integers(1, 3)), *draw(st.lists(st.integers(0, 3), max_size=11))),
        "group": draw(st.integers(1, 4)),
        "layers": draw(st.integers(1, 6)),
        "experts": experts,
        "top_k": draw(st.integers(1, experts)),
        "mini_batch": draw(st.sampled_from([1, 2, 4, 128])),
        "periods": (draw(st.integers(0, 3)), draw(st.integers(0, 3))),
        "requests": draw(st.integers(1, 3)),
        "prompt": draw(st.integers(1, 9)),
        "answer": draw(st.integers(1, 5)),
        "main": draw(st.integers(0, 30)),
        "load": draw(st.integers(0, 60)),
        "compute": draw(st.integers(0, 20)),
        "latency": draw(st.integers(0, 10)),
        "shadow": draw(st.booleans()),
        "predict": draw(st.integers(0, 60)),
        "accuracy": draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        "failing": draw(st.sampled_from([0.0, 0.0, 0.03, 0.3])),
        "faults": tuple(draw(st.lists(FAULTS, max_size=6))),
        "policy": draw(st.sampled_from(["none", "none", "all", "lru", "even", "quota"])),
        "predictor": draw(st.sampled_from(["none", "chance", "gate", "attention", "token"])),
        "prefill": draw(st.sampled_from(["ahead", "pipelined", "in-turn"])),
        "router": draw(st.booleans()),
        "split": draw(st.booleans()),
        "forms": draw(st.sampled_from([False, False, False, True])),
    }


@SETTINGS
@given(fields=plan_fields())
def test_whatever_happens_the_referee_finds_nothing_wrong(world: ModuleType, fields: dict[str, Any]) -> None:
    plan = world.Plan(**fields)
    seen = world.live(world.roomy(plan) if plan.stay and plan.seed % 8 else plan).referee.seen
    for what in sorted(+seen):
        event(what)


@SETTINGS
@given(fields=plan_fields())
def test_without_losses_and_failures_every_request_is_answered(world: ModuleType, fields: dict[str, Any]) -> None:
    quiet = tuple(fault for fault in fields["faults"] if fault[1].startswith("shadow"))
    plan = world.Plan(**{**fields, "failing": 0.0, "faults": quiet})
    seen = world.live(world.roomy(plan) if plan.stay else plan).referee.seen
    assert not seen["failed: too few slots"]
    assert not seen["failed: too often"]
    assert not seen["failed: no worker"]
    assert not seen["closed in a layer"]


def test_the_random_worlds_reach_every_branch_that_is_hard(world: ModuleType) -> None:
    """Else the tests above would prove little."""
    seen: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    for seed in range(120):
        happened = world.live(world.random_plan(seed)).referee.seen
        seen += happened
        runs.update(+happened)
    often = {
        "reload", "predicted, loaded late", "displaced", "unused", "late prediction", "second prediction", "stall",
        "several chunks", "stale fact", "load failed", "compute failed", "recall between 0 and 1", "unpredicted",
        "put off", "two on a link", "form full", "clear",
    }  # fmt: skip
    rare = {
        "lost while idle", "lost while loading", "lost while computing", "joined late", "closed in a layer",
        "shadow lost", "failed: no worker", "failed: too often",
    }  # fmt: skip
    assert set(seen) == often | rare
    assert {what: runs[what] for what in often if runs[what] < 10} == {}
    assert {what: runs[what] for what in rare if runs[what] < 2} == {}


def test_random_choices_reach_every_branch_that_is_hard(world: ModuleType) -> None:
    """Policies, predictors, ways of prefill as often as each other; a host place in two of five."""
    seen: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    for seed in range(160):
        happened = world.live(world.choosing_plan(seed)).referee.seen
        seen += happened
        runs.update(+happened)
    expected = {
        "computed where it was": 60, "shared": 30, "loaded in turn": 20, "failed: too few slots": 2, "reload": 60,
        "load failed": 20, "compute failed": 20, "lost while computing": 5, "stall": 60, "several chunks": 20,
        "closed in a layer": 3, "recall between 0 and 1": 60, "displaced": 60, "unused": 40, "victim": 40, "warm": 15,
        "warmed": 10, "first of the idle": 10, "computed by a host": 25, "host failed": 5, "host lost at work": 2,
        "routed": 20, "form int4": 15, "brings others": 40, "late prediction": 60, "clear": 30, "put off": 60,
    }  # fmt: skip
    assert {what: runs[what] for what, least in expected.items() if runs[what] < least} == {}


@pytest.mark.parametrize("seed", range(4))
def test_what_stays_is_loaded_once_whatever_the_slots(world: ModuleType, seed: int) -> None:
    """Uneven workers, several requests, nothing lost: no expert is loaded twice, so there are at most as many loads."""
    plan = world.Plan(
        seed=seed, slots=(1, 3, 2, 5), group=2, layers=5, experts=6, top_k=2, requests=3, answer=5, policy="all"
    )
    core = world.live(world.roomy(plan)).core
    loads = sum(one.loads for one in core.stats.values())
    hits = sum(one.hits for one in core.stats.values())
    preempted = sum(one.preempted for one in core.stats.values())
    assert sum(one.bytes_loaded for one in core.stats.values()) <= 5 * 6 * world.NBYTES
    assert loads <= 5 * 6 + preempted
    assert hits >= 3 * 5 * 5 * 2 - loads


@pytest.mark.parametrize("policy", ["lru", "even", "quota"])
def test_policies_that_evict_never_leave_anybody_waiting(world: ModuleType, policy: str) -> None:
    """Whatever fails and whoever is lost: every request is answered or fails with a reason."""
    seen: Counter[str] = Counter()
    for seed in range(80):
        seen += world.live(replace(world.choosing_plan(seed), policy=policy)).referee.seen
    assert seen["hits"] > 300
    assert seen["victim"] > 300


@pytest.mark.parametrize("policy", sorted(set(RESIDENCIES) - {"none", "all"}))
def test_the_policies_of_systems_never_leave_anybody_waiting(world: ModuleType, policy: str) -> None:
    """On one to three workers, with host places, failures and losses; the referee's books must agree."""
    hits = 0
    for seed in range(25):
        rng = Random(f"{policy}{seed}")
        slots = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 3)))
        plan = replace(world.choosing_plan(seed), policy=policy, slots=(*slots, 0) if rng.random() < 0.3 else slots)
        hits += world.live(plan).referee.seen["hits"]
    assert hits > 50


def right_predictions(world: ModuleType, **fields: Any) -> Any:
    """One request, a shadow far ahead that is always right, eight workers in groups of two."""
    plan = world.Plan(
        slots=(1,) * 8, group=2, layers=8, experts=8, top_k=2, prompt=4, answer=6, accuracy=1.0, predict=0, **fields
    )
    return world.live(plan)


@pytest.mark.parametrize("seed", range(8))
def test_a_perfect_shadow_reloads_nothing(world: ModuleType, seed: int) -> None:
    stats = right_predictions(world, seed=seed, main=40, load=1, compute=1, latency=0).core.stats[1]
    # One prediction in twenty never comes; every other one is right.
    assert stats.overall.recall == 1.0
    assert stats.unpredicted < 0.2 * stats.overall.activated
    assert stats.reloads == stats.unpredicted + 2 * stats.late


@pytest.mark.parametrize("seed", range(8))
def test_workers_that_load_faster_than_the_main_node_works_never_stall_it(world: ModuleType, seed: int) -> None:
    """Without a shadow the same world stalls at every layer whose load takes any time at all."""
    fast = right_predictions(world, seed=seed, main=40, load=0, compute=1, latency=0).core.stats[1]
    assert fast.stall_s == 0
    alone = right_predictions(world, seed=seed, main=40, load=10, compute=1, latency=0, shadow=False).core.stats[1]
    assert alone.reloads == 6 * 8 * 2
    assert alone.stall_s > 6 * 8 * 10 / 2


def test_the_referee_is_not_asleep(world: ModuleType) -> None:
    """A core that forgets an eviction, or resumes too early, is caught."""
    plan = world.Plan(seed=1, accuracy=0.5, predictor="attention", router=True)

    def spoilt(what: str) -> None:
        run = world.World(plan)
        handle, done = run.core.handle, []

        def spoil(incident: Any, now: float) -> list[Any]:
            commands = handle(incident, now)
            victims = [c for c in commands if type(c).__name__ == what]
            if victims and not done:
                done.append(victims[0])
                return [c for c in commands if c is not victims[0]]
            return commands

        run.core.handle = spoil
        run.run()

    for what in ("Load", "Compute", "Evict", "Resume", "Route"):
        with pytest.raises((AssertionError, KeyError)):
            spoilt(what)
