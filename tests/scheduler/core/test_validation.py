"""The core's check of its own books: a change to one of two copies is noticed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest

from scheduler.core.state import TRANSITIONS, Demand, DemandState, InconsistentStateError, State
from scheduler.core.validation import validate
from scheduler.types import ExpertId
from support.scheduling.core_driver import Driver
from support.worlds.plan import random_plan
from support.worlds.world import live

STATES: tuple[DemandState, ...] = get_args(DemandState)


@pytest.fixture
def busy() -> State:
    """A gate waits for two experts; one of them is loaded. Those of the next layer are on their way, and those of the
    layer after that are queued."""
    d = Driver(workers=4, group=2, layers=3)
    d.open()
    for layer in range(3):
        d.predict(layer, 2 * layer + 1, 2 * layer + 2)
    d.loaded(0)
    d.gate(0, 1, 2)
    return d.core._state


def demand(state: State, layer: int, expert: int) -> Demand:
    return next(v for v in state.visits.values() if v.id.layer == layer).demands[expert]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: setattr(state.workers[0], "backlog", 7), "worker 0: 1 chosen experts .* and 7 are counted"),
        (lambda state: state.workers[1].free.append(0), r"worker 1: slots \[\] are free, and \[0\] are listed"),
        (lambda state: state.workers[1].link.clear(), "worker 1: 1 loads are in flight, and 0 are listed"),
        (lambda state: state.workers[0].queue.clear(), "expert 5 of layer 2 .* is queued, and not in that place"),
        (lambda state: state.workers[0].queue.reverse() or state.workers[0].queue.append(demand(state, 0, 1)), "order"),
        (lambda state: state.loads.clear(), "the loads .* are in flight"),
        (lambda state: state.calls.clear(), "the computations .* are under way"),
        (lambda state: state.queued.pop(ExpertId(2, 5)), "demands are listed as queued"),
        (lambda state: state.passing.clear(), "experts in slots are not listed as shared"),
        (lambda state: state.touched.add(1), "are left to be looked at"),
        (lambda state: setattr(demand(state, 0, 1), "state", "queued"), "is queued, and not in that place"),
        (lambda state: setattr(demand(state, 0, 2), "state", "ready"), "is ready, and its load has not ended"),
        (lambda state: setattr(demand(state, 2, 5), "worker", 1), "is queued, and not in that place of worker 1"),
        (lambda state: setattr(demand(state, 0, 1).visit, "uncomputed", 1), "waits for 1 experts, and 2 are chosen"),
        (lambda state: setattr(demand(state, 0, 1).visit, "missing", 0), "misses 0 experts in slots, not 1"),
        (lambda state: state.waiting.update({99: demand(state, 2, 5)}), "waits for a worker, and no visit needs it so"),
        (lambda state: state.requests.clear(), "is not its request's"),
        (
            lambda state: setattr(state, "tried", Demand(99, None, ExpertId(0, 1), "gate")),
            "is tried again, and no visit",
        ),
        (lambda state: state.held_back.update(state.visits), "visits .* are left to be looked at"),
        (lambda state: setattr(state.workers[2].slots[0], "slot", 1), "slot 0 has an expert of slot 1 of worker 2"),
        (lambda state: state.workers[2].slots[0].users.clear(), r"worker 2: the experts .* are in slots for nobody"),
        (lambda state: setattr(state.workers[2].slots[0], "keeps", True), "are listed as kept, and others are"),
        (lambda state: state.workers[0].idle.update({ExpertId(0, 1): None}), "are kept for later, and .* are listed"),
        (
            lambda state: state.workers[0].hosted.update({99: demand(state, 2, 5)}),
            "a demand is listed twice",
        ),
    ],
)
def test_each_contradiction_is_named(busy: State, change: Callable[[State], object], says: str) -> None:
    validate(busy)
    change(busy)
    with pytest.raises(InconsistentStateError, match=says):
        validate(busy)


@pytest.mark.slow
def test_a_demand_changes_as_the_table_says_and_no_row_of_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random worlds make each transition. Any other is refused."""
    seen: set[tuple[DemandState, DemandState]] = set()
    move = Demand._move

    def watched(self: Demand, to: DemandState) -> None:
        seen.add((self.state, to))
        move(self, to)

    monkeypatch.setattr(Demand, "_move", watched)
    for seed in range(12):
        live(replace(random_plan(seed), forms=True, policy="lru", placement=True, slots=(2, 2, 0)))
    assert seen == TRANSITIONS.keys()
    assert all(callable(getattr(Demand, what.partition(":")[0])) for what in TRANSITIONS.values())
    assert {source for source, _ in TRANSITIONS} == set(STATES) - {"over"}


@pytest.mark.parametrize(("source", "to"), sorted(set(itertools.product(STATES, STATES)) - TRANSITIONS.keys()))
def test_any_other_change_is_refused(busy: State, source: DemandState, to: DemandState) -> None:
    one = demand(busy, 2, 5)
    one.state = source
    with pytest.raises(InconsistentStateError, match=f"expert 5 of layer 2 goes from {source} to {to}"):
        one._move(to)
