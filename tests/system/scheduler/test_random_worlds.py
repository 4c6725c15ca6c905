"""The core in thousands of random worlds, under the referee (`referee.py`). About 130 seconds of one core.

The worlds are the same every time. To look for what these have not found, ask for others:
ODMOE_FIRST_WORLD=100000 ODMOE_WORLDS=50000 make test-system. What fails is named by its plan and seed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings

from scheduler.policies.registry import RESIDENCIES
from support.worlds.drawn_plans import plans
from support.worlds.plan import Plan, choosing_plan, eventful_plan, random_plan, roomy, stepping_plan
from support.worlds.world import live

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]

WORLDS = int(os.environ.get("ODMOE_WORLDS", "3000"))
FIRST = int(os.environ.get("ODMOE_FIRST_WORLD", "0"))
SHARES = {random_plan: 0.2, choosing_plan: 0.2, eventful_plan: 0.3, stepping_plan: 0.3}
"""Of the worlds: with OD-MoE's choices, with any, drawn towards what is rare, with several requests in lock-step."""
SETTINGS = settings(
    max_examples=WORLDS // 20,
    derandomize=FIRST == 0,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.parametrize("make", SHARES)
def test_the_referee_finds_nothing_wrong(make: Callable[[int], Plan]) -> None:
    wrong: dict[int, str] = {}
    for seed in range(FIRST, FIRST + round(WORLDS * SHARES[make])):
        try:
            live(make(seed))
        except Exception as error:  # noqa: BLE001 - whatever it is, the other worlds are to be seen as well
            wrong[seed] = repr(error)
    assert wrong == {}


@pytest.mark.parametrize("make", SHARES)
def test_the_referee_finds_nothing_wrong_with_audits(make: Callable[[int], Plan]) -> None:
    wrong: dict[int, str] = {}
    for seed in range(FIRST, FIRST + round(WORLDS * SHARES[make] / 4)):
        try:
            live(replace(make(seed), auditing=(0.05, 0.3)[seed % 2]))
        except Exception as error:  # noqa: BLE001 - whatever it is, the other worlds are to be seen as well
            wrong[seed] = repr(error)
    assert wrong == {}


@SETTINGS
@given(plan=plans())
def test_whatever_is_drawn_the_referee_finds_nothing_wrong(plan: Plan) -> None:
    live(roomy(plan) if plan.stay and plan.seed % 8 else plan)


@SETTINGS
@given(plan=plans())
def test_without_losses_and_failures_every_request_is_answered(plan: Plan) -> None:
    quiet = tuple(fault for fault in plan.faults if fault[1].startswith("shadow"))
    plan = replace(plan, failing=0.0, faults=quiet)
    seen = live(roomy(plan) if plan.stay else plan).referee.seen
    assert not any(what.startswith(("failed:", "closed in")) for what in +seen)


@pytest.mark.parametrize("policy", ["lru", "even", "quota"])
def test_policies_that_evict_never_leave_anybody_waiting(policy: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + 80):
        seen += live(replace(choosing_plan(seed), policy=policy)).referee.seen
    assert seen["hits"] > 300
    assert seen["victim"] > 300


@pytest.mark.parametrize("policy", sorted(set(RESIDENCIES) - {"none", "all"}))
def test_the_policies_of_systems_never_leave_anybody_waiting(policy: str) -> None:
    """On one to three workers, with host places, failures and losses; the referee's books must agree."""
    hits = 0
    for seed in range(FIRST, FIRST + 50):
        rng = Random(f"{policy}{seed}")
        slots = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 3)))
        slots = (*slots, 0) if rng.random() < 0.3 else slots
        hits += live(replace(choosing_plan(seed), policy=policy, slots=slots)).referee.seen["hits"]
    assert hits > 50


def test_random_choices_reach_every_branch_that_is_hard() -> None:
    """Policies, predictors, ways of prefill as often as each other; a host place in two of five. In how many worlds."""
    runs: Counter[str] = Counter()
    for seed in range(320):
        runs.update((+live(choosing_plan(seed)).referee.seen).keys())
    expected = {
        "computed where it was": 60,
        "shared": 30,
        "loaded in turn": 20,
        "failed: too few slots": 2,
        "reload": 60,
        "load failed": 20,
        "compute failed": 20,
        "lost while computing": 5,
        "stall": 60,
        "several chunks": 20,
        "closed in a layer": 3,
        "recall between 0 and 1": 60,
        "pre-empted": 60,
        "unused": 40,
        "victim": 40,
        "warm": 15,
        "warmed": 10,
        "first of the idle": 10,
        "computed by a host": 25,
        "host failed": 5,
        "host lost at work": 2,
        "routed": 20,
        "form int4": 15,
        "brings others": 40,
        "late prediction": 60,
        "clear": 30,
        "put off": 60,
        "waited in a layer": 15,
        "waited for nothing": 15,
    }
    assert {what: runs[what] for what, least in expected.items() if runs[what] < least} == {}
