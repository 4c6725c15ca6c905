"""Audits, exact decisions: where they are computed, and that they give way to requests."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from typing import Any

import pytest

from scheduler import types as t
from scheduler.policies.precision import FULL, INT4, Uniform
from scheduler.policies.residency.base import ResidencyBase
from scheduler.policies.residency.lru import LRU
from scheduler.types import ExpertId
from support.scheduling.core_driver import Driver, P, compute, in_place

COSTS = (t.FormCost(FULL, 9, 0, True), t.FormCost(INT4, 3, 2, True))


class Keeps(ResidencyBase):
    """Every expert stays until another needs its slot. `asked`: all that the core has told the policy."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        self.asked.append(("keeps", worker, expert, predicted))
        return True

    def on_gate_fired(self, *told: Any) -> None:
        self.asked.append(("observed", *told))

    def on_used(self, *told: Any) -> None:
        self.asked.append(("used", *told))

    def on_left(self, *told: Any) -> None:
        self.asked.append(("left", *told))

    def full(self, incoming: ExpertId) -> bool:
        self.asked.append(("full", incoming))
        return False

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        self.asked.append(("victim", worker, incoming, [*evictable]))
        return next(iter(evictable))


def audit(d: Driver, layer: int, expert: int, *avoid: int, number: int = 1, rows: int = 1) -> list[str]:
    return d.do(t.AuditRequested(number, ExpertId(layer, expert), rows, avoid))


def audited(*places: str, number: int = 1, rows: str = "0:1", last: bool = True) -> list[str]:
    return compute(*places, at=f"-{number}@0", rows=rows, last=last)


def keeping(**fields: Any) -> tuple[Driver, Keeps]:
    """Worker 0 has expert 0/4 in slot 0, and every expert stays."""
    policy = Keeps()
    d = Driver(**({"workers": 2, "slots": 2, "group": 1, "layers": 2, "residency": policy} | fields))
    d.open()
    d.gate(0, 4)
    d.loaded(0)
    d.computed(0)
    return d, policy


# --- where ------------------------------------------------------------------------------------------------------------


def test_a_worker_with_a_free_slot_loads_computes_and_evicts() -> None:
    d = Driver(workers=2)
    assert audit(d, 3, 5, 0, rows=300) == ["load 1.0 3/5", *audited("1.0 3/5", rows="0:300")]
    assert not d.core.idle()
    assert d.loaded(1) == []
    assert d.computed(1) == []
    assert d.core.idle()
    assert d.core.snapshot().workers[1].free == (0,)


def test_its_identity_is_in_the_visit() -> None:
    d = Driver(workers=2)
    audit(d, 3, 5, 0, number=12)
    assert d.calls[1, 0][0].visit == t.Visit(-12, 0, 3)
    snapshot = d.core.snapshot()
    assert snapshot.audits == (12,)
    assert snapshot.loads == (d.in_slots[1, 0].load_id,)
    assert snapshot.calls == (d.calls[1, 0][0].call_id,)
    assert snapshot.workers[1].loading == (ExpertId(3, 5),)


def test_nobody_left_but_those_to_avoid() -> None:
    d = Driver(workers=2)
    assert audit(d, 3, 5, 0, 1) == ["drop audit 1"]
    assert d.core.idle()


def test_never_at_a_host_place_and_without_workers_not_at_all() -> None:
    assert audit(Driver(mixed=(1, 0)), 3, 5, 0) == ["drop audit 1"]
    assert audit(Driver(workers=0), 3, 5) == ["drop audit 1"]


def test_the_worker_with_the_most_free_slots_of_equals_each_in_turn() -> None:
    assert audit(Driver(mixed=(1, 1, 3, 2)), 3, 5)[0] == "load 2.0 3/5"
    places = [audit(Driver(workers=3), 3, 5, 1, number=number)[0] for number in range(1, 7)]
    assert places == [f"load {worker}.0 3/5" for worker in (2, 2, 0, 2, 2, 0)]


def test_where_it_is_kept_nothing_is_loaded_and_nothing_evicted() -> None:
    d, policy = keeping()
    before, known = list(policy.asked), asdict(d.stats())
    assert audit(d, 0, 4, 1) == audited("0.0 0/4", last=False)
    assert not d.core.idle()
    assert d.computed(0) == []
    assert d.core.snapshot().workers[0].kept == {ExpertId(0, 4)}
    assert (policy.asked, asdict(d.stats())) == (before, known)


def test_where_the_worker_that_keeps_it_is_to_be_avoided_another_loads_it() -> None:
    d, policy = keeping()
    before = list(policy.asked)
    assert audit(d, 0, 4, 0) == ["load 1.0 0/4", *audited("1.0 0/4")]
    d.loaded(1)
    assert d.computed(1) == []
    assert policy.asked == before


def test_what_is_kept_and_not_loaded_yet_is_not_shared() -> None:
    d, _ = keeping(workers=1)
    d.predict(1, 6)
    assert audit(d, 1, 6) == ["drop audit 1"]


def test_a_kept_expert_in_a_smaller_form_is_not_comparable() -> None:
    d = Driver(workers=0, layers=2, residency=Keeps(), precision=Uniform(INT4))
    d.do(t.WorkerJoined(0, 2, forms=COSTS))
    d.open()
    assert d.gate(0, 4)[0] == "load 0.0 0/4 int4"
    d.loaded(0)
    d.computed(0)
    assert audit(d, 0, 4) == ["load 0.1 0/4", *audited("0.1 0/4")]


def test_a_worker_whose_slots_cannot_hold_the_full_form_is_not_asked() -> None:
    d = Driver(workers=0, layers=2, precision=Uniform(INT4))
    d.do(t.WorkerJoined(0, 2))
    d.do(t.WorkerJoined(1, 2, forms=(COSTS[0]._replace(fits=False), COSTS[1])))
    assert audit(d, 0, 4) == ["drop audit 1"]
    d.do(t.WorkerJoined(2, 1, forms=COSTS))
    assert audit(d, 0, 4)[0] == "load 2.0 0/4"


def test_a_worker_with_another_form_in_host_memory_is_passed_over() -> None:
    """A worker takes an expert out of host memory if it is loaded in another form and may not stay there."""
    shape = t.ModelShape((0, 1), 8, 2)
    d = Driver(workers=0, group=1, layers=2, precision=Uniform(INT4), host_residency=LRU(shape))
    d.do(t.WorkerJoined(0, 1, forms=COSTS, host_slots=2))
    d.open()
    assert d.gate(0, 4)[-2] == "load 0.0 0/4 int4 through 0"
    d.loaded(0)
    d.computed(0)
    assert audit(d, 0, 4) == ["drop audit 1"]
    d.do(t.WorkerJoined(1, 1, forms=COSTS, host_slots=2))
    assert audit(d, 0, 4) == ["load 1.0 0/4", *audited("1.0 0/4")]


def test_a_load_that_failed_is_read_from_disk_the_next_time() -> None:
    """A worker drops what it could not load from host memory."""
    d = Driver(workers=1, layers=2, host_slots=2, host_residency=LRU(t.ModelShape((0, 1), 8, 2)))
    d.open()
    d.gate(0, 4)
    d.loaded(0)
    d.computed(0)
    assert audit(d, 0, 4)[0] == "load 0.0 0/4 from 0"
    assert d.load_failed(0) == ["evict 0.0 0/4", "drop audit 1"]
    assert audit(d, 0, 4)[0] == "load 0.0 0/4"


# --- requests come first ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("busy", ["computes", "loads", "prefetches"])
def test_a_worker_that_a_request_uses_is_not_asked(busy: str) -> None:
    d = Driver(workers=1, slots=3, group=1)
    d.open()
    if busy == "prefetches":
        d.predict(0, 3)
    else:
        d.gate(0, 3)
        if busy == "computes":
            d.loaded(0)
    assert audit(d, 3, 5) == ["drop audit 1"]


def test_a_worker_that_holds_a_prefetch_and_a_free_slot_is_asked() -> None:
    d = Driver(workers=1, slots=2, group=1)
    d.open()
    d.predict(0, 3)
    d.loaded(0)
    assert audit(d, 3, 5) == ["load 0.1 3/5", *audited("0.1 3/5")]


def test_one_audit_at_a_time_on_a_worker() -> None:
    d, _ = keeping()
    assert audit(d, 0, 4, 1, number=1) == audited("0.0 0/4", last=False)
    assert audit(d, 0, 5, 1, number=2) == ["drop audit 2"]
    assert audit(d, 0, 4, 1, number=3) == ["drop audit 3"]
    d.computed(0)
    assert audit(d, 0, 5, 1, number=4) == ["load 0.1 0/5", *audited("0.1 0/5", number=4)]


def test_its_load_gives_way_to_a_gate() -> None:
    d = Driver(workers=1)
    d.open()
    audit(d, 3, 5)
    assert d.gate(0, 4) == ["evict 0.0 3/5", "drop audit 1", "load 0.0 0/4", *compute("0.0 0/4")]
    d.loaded(0)
    assert d.computed(0) == [f"resume 1@{P} layer 0"]


def test_its_load_gives_way_to_a_prediction() -> None:
    d = Driver(workers=1)
    d.open()
    audit(d, 3, 5)
    assert d.predict(0, 4) == ["evict 0.0 3/5", "drop audit 1", "load 0.0 0/4"]


def test_its_load_gives_way_though_another_slot_is_free() -> None:
    """They would share the link."""
    d = Driver(workers=1, slots=2)
    d.open()
    audit(d, 3, 5)
    assert d.gate(0, 4) == ["evict 0.0 3/5", "drop audit 1", "load 0.0 0/4", *compute("0.0 0/4")]


def test_its_load_gives_way_to_a_demand_for_the_very_expert() -> None:
    """Figures of the request are as if there were no audits."""
    d = Driver(workers=1)
    d.open()
    audit(d, 0, 4)
    assert d.gate(0, 4) == ["evict 0.0 0/4", "drop audit 1", "load 0.0 0/4", *compute("0.0 0/4")]
    d.loaded(0)
    d.computed(0)
    assert (d.stats().loads, d.stats().bytes_loaded, d.stats().reloads, d.stats().reused) == (1, 10, 1, 0)


def test_a_load_elsewhere_does_not_disturb_it() -> None:
    d = Driver(workers=2)
    d.open()
    audit(d, 3, 5, 0)
    assert d.gate(0, 4) == ["load 0.0 0/4", *compute("0.0 0/4")]
    assert d.core.snapshot().audits == (1,)


def test_once_it_is_loaded_a_gate_waits_for_its_computation() -> None:
    d = Driver(workers=1)
    d.open()
    audit(d, 3, 5)
    d.loaded(0)
    assert d.predict(0, 4) == []
    assert d.gate(0, 4) == []
    assert d.computed(0) == ["load 0.0 0/4", *compute("0.0 0/4")]


def test_once_it_is_loaded_another_slot_serves() -> None:
    d = Driver(workers=1, slots=2)
    d.open()
    audit(d, 3, 5)
    d.loaded(0)
    assert d.gate(0, 4) == ["load 0.1 0/4", *compute("0.1 0/4")]
    d.loaded(0, slot=1)
    assert d.computed(0) == []
    assert d.computed(0, slot=1) == [f"resume 1@{P} layer 0"]


def test_a_lost_load_ended_changes_nothing() -> None:
    d = Driver(workers=1)
    d.open()
    audit(d, 3, 5)
    late = d.in_slots[0, 0].load_id
    assert d.computed(0) == []
    assert d.gate(0, 4) == ["load 0.0 0/4", *compute("0.0 0/4")]
    assert d.do(t.LoadEnded(late)) == []
    assert d.stats().bytes_loaded == 0


def test_a_kept_expert_that_is_evicted_takes_its_audit_with_it() -> None:
    d, policy = keeping(workers=1, slots=1)
    audit(d, 0, 4)
    assert d.gate(0, 5, at=P + 1) == [
        "evict 0.0 0/4",
        "drop audit 1",
        "load 0.0 0/5",
        *in_place("0.0 0/5", at=f"1@{P + 1}"),
    ]
    assert ("victim", 0, (0, 5), [(0, 4)]) in policy.asked


def test_a_gate_that_needs_the_kept_expert_shares_it_with_the_audit() -> None:
    d, _ = keeping()
    audit(d, 0, 4, 1)
    assert d.gate(0, 4, at=P + 1) == in_place("0.0 0/4", at=f"1@{P + 1}")
    assert d.computed(0) == []
    assert d.computed(0) == [f"resume 1@{P + 1} layer 0"]


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_failed_load_is_not_tried_again() -> None:
    d = Driver(workers=2)
    audit(d, 3, 5, 0)
    assert d.load_failed(1) == ["evict 1.0 3/5", "drop audit 1"]
    assert d.core.idle()
    assert d.core.snapshot().workers[1].free == (0,)


def test_a_failed_computation_is_not_tried_again() -> None:
    d = Driver(workers=2)
    audit(d, 3, 5, 0)
    d.loaded(1)
    assert d.do(t.ComputeFailed(d.calls[1, 0][0].call_id, "out of memory")) == ["evict 1.0 3/5", "drop audit 1"]
    assert d.core.snapshot().workers[1].free == (0,)


def test_a_failed_computation_leaves_the_kept_expert_where_it_is() -> None:
    d, _ = keeping()
    audit(d, 0, 4, 1)
    assert d.do(t.ComputeFailed(d.calls[0, 0].pop().call_id, "out of memory")) == ["drop audit 1"]
    assert d.core.snapshot().workers[0].kept == {ExpertId(0, 4)}
    assert d.gate(0, 4, at=P + 1) == in_place("0.0 0/4", at=f"1@{P + 1}")


@pytest.mark.parametrize("kept", [False, True])
def test_it_is_dropped_with_its_worker(kept: bool) -> None:
    if kept:
        d, _ = keeping()
        audit(d, 0, 4, 1)
    else:
        d = Driver(workers=2)
        audit(d, 3, 5, 1)
    call = d.calls[0, 0][-1].call_id
    assert d.lose(0)[:1] == ["drop audit 1"]
    assert d.do(t.ComputeEnded(call)) == []
    assert d.core.snapshot().audits == ()


def test_what_is_said_of_a_dropped_audit_changes_nothing() -> None:
    d = Driver(workers=1)
    d.open()
    audit(d, 3, 5)
    load, call = d.in_slots[0, 0].load_id, d.calls[0, 0][0].call_id
    d.gate(0, 4)
    for event in (t.LoadEnded(load), t.LoadFailed(load, "late"), t.ComputeEnded(call), t.ComputeFailed(call, "late")):
        assert d.do(event) == []
    assert d.core.snapshot().workers[0].slots == (ExpertId(0, 4),)


def test_a_request_that_is_closed_leaves_audits_alone() -> None:
    d = Driver(workers=1, shadow=False)
    d.open()
    audit(d, 3, 5)
    assert d.do(t.RequestClosed(1)) == []
    assert d.core.snapshot().audits == (1,)
    d.loaded(0)
    d.computed(0)
    assert d.core.idle()
