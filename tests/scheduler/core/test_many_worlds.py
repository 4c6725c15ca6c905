"""The core in a thousand more random worlds, under the referee (`referee.py`). About a minute of one core.

The worlds are the same every time. To look for what these have not found, ask for others:
ODMOE_FIRST_WORLD=100000 ODMOE_WORLDS=50000 make test-slow. What fails is named by its plan and seed.
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
from support.worlds.plan import Plan, choosing_plan, eventful_plan, parted_plan, random_plan, roomy, stepping_plan
from support.worlds.world import live

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

WORLDS = int(os.environ.get("ODMOE_WORLDS", "1000"))
FIRST = int(os.environ.get("ODMOE_FIRST_WORLD", "200"))
"""tests/scheduler/core has the first worlds of each kind."""
SHARES = {random_plan: 0.2, choosing_plan: 0.2, eventful_plan: 0.3, stepping_plan: 0.3, parted_plan: 0.3}
"""Of the worlds: with OD-MoE's choices, with any, drawn towards what is rare, with several requests in lock-step, of a
store in parts."""
AUDITING = (0.0, 0.0, 0.05, 0.0, 0.3)
"""By turns."""
SETTINGS = settings(
    max_examples=WORLDS // 20,
    derandomize="ODMOE_FIRST_WORLD" not in os.environ,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def live_through(make: Callable[[int], Plan]) -> Counter[str]:
    """Its share of the worlds. In how many of them each thing has happened."""
    wrong: dict[int, str] = {}
    runs: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + round(WORLDS * SHARES[make])):
        try:
            world = live(replace(make(seed), auditing=AUDITING[seed % len(AUDITING)]))
            runs.update((+world.referee.seen).keys())
        except Exception as error:  # noqa: BLE001 - whatever it is, the other worlds are to be seen as well
            wrong[seed] = repr(error)
    assert wrong == {}
    return runs


@pytest.mark.parametrize("make", [random_plan, eventful_plan, stepping_plan, parted_plan])
def test_the_referee_finds_nothing_wrong(make: Callable[[int], Plan]) -> None:
    live_through(make)


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


def test_random_choices_reach_every_branch_that_is_hard() -> None:
    """Policies, predictors, ways of prefill as often as each other; a host place in two of five. In how many worlds of
    two hundred."""
    runs = live_through(choosing_plan)
    expected = {
        "computed where it was": 40,
        "shared": 18,
        "loaded in turn": 12,
        "failed: too few slots": 2,
        "reload": 40,
        "load failed": 12,
        "compute failed": 12,
        "lost while computing": 3,
        "stall": 40,
        "several chunks": 12,
        "closed in a layer": 2,
        "recall between 0 and 1": 40,
        "pre-empted": 40,
        "unused": 25,
        "victim": 25,
        "warm": 9,
        "warmed": 6,
        "first of the idle": 6,
        "computed by a host": 15,
        "host failed": 3,
        "host lost at work": 2,
        "routed": 12,
        "form int4": 9,
        "brings others": 25,
        "late prediction": 40,
        "clear": 18,
        "put off": 40,
        "waited in a layer": 9,
        "waited for nothing": 9,
    }
    worlds = WORLDS * SHARES[choosing_plan]
    assert {what: runs[what] for what, least in expected.items() if runs[what] < least * worlds / 200} == {}


@pytest.mark.parametrize("policy", sorted(set(RESIDENCIES) - {"none", "all"}))
def test_the_policies_of_systems_never_leave_anybody_waiting(policy: str) -> None:
    """On one to three workers, with host places, failures and losses; the referee's books must agree."""
    hits = 0
    for seed in range(FIRST, FIRST + 12):
        rng = Random(f"{policy}{seed}")
        slots = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 3)))
        slots = (*slots, 0) if rng.random() < 0.3 else slots
        hits += live(replace(choosing_plan(seed), policy=policy, slots=slots)).referee.seen["hits"]
    assert hits > 50
