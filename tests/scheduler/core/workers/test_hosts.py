"""A host place, exact decisions: what it computes where it lies, and what becomes of that when it fails."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler import types as t
from scheduler.policies.placement import Costs, HostOnly, ResidentOnly
from support.scheduling.core_driver import Driver, P, compute
from support.scheduling.policies import LastUsed


class Takes:
    """Always these. `asked`: what it was told."""

    def __init__(self, *experts: int) -> None:
        self.experts = set(experts)
        self.asked: list[tuple[dict[int, int], dict[int, int], Costs, bool]] = []

    def host(self, missing: Any, resident: Any, costs: Costs, prefill: bool) -> set[int]:
        self.asked.append((dict(missing), dict(resident), costs, prefill))
        return self.experts & {*missing, *resident}


def place(placement: Any, **fields: Any) -> Driver:
    """Worker 0 has slots, worker 1 is a host place."""
    return Driver(**({"mixed": (2, 0), "group": 1, "layers": 2, "placement": placement} | fields))


def test_a_host_place_has_no_slots_and_no_experts_are_assigned_to_it() -> None:
    d = place(Takes())
    d.open()
    assert d.core.workers == [0, 1]
    assert d.predict(0, 3, 5) == ["load 0.0 0/3", "load 0.1 0/5"]
    assert d.gate(0, 3, 5) == compute("0.0 0/3", "0.1 0/5")


def test_what_the_placement_says_is_computed_at_once_without_a_load() -> None:
    d = place(Takes(5))
    d.open()
    assert d.gate(0, 3, 5) == [*compute("1.0 0/5", last=False), "load 0.0 0/3", *compute("0.0 0/3")]
    d.now = 2.0
    d.loaded(0)
    assert d.computed(1) == []
    assert d.computed(0) == [f"resume 1@{P} layer 0"]
    stats = d.stats()
    assert (stats.host_calls, stats.decode_host_calls, stats.loads, stats.reloads) == (1, 1, 1, 1)
    assert (stats.named, stats.present, stats.reused, stats.stall_s) == (2, 0, 0, 2.0)


def test_a_layer_that_the_host_computes_alone_does_not_stall() -> None:
    d = place(HostOnly())
    d.open()
    d.now = 1.0
    assert d.gate(0, 3, 5) == compute("1.0 0/3", "1.0 0/5", last=False)
    d.now = 9.0
    assert d.computed(1, 1) == [f"resume 1@{P} layer 0"]
    assert (d.stats().stall_s, d.stats().loads, d.stats().host_calls) == (0.0, 0, 2)


def test_a_prompts_rows_go_to_the_host_at_once_and_to_the_device_in_parts() -> None:
    """As the placement was told: one call for all rows of an expert."""
    d = place(Takes(5), prefill="pipelined", mini_batch=None)
    d.prefill(40)
    assert d.gate(0, at=0, rows={3: 40, 5: 40}) == [
        "compute 1.0 0/5 1@0 0:40",
        "load 0.0 0/3",
        *(f"compute 0.0 0/3 1@0 {part}" for part in ("0:16", "16:32", "32:40 last")),
    ]


def test_a_mini_batch_that_was_asked_for_holds_for_the_host_too() -> None:
    d = place(Takes(5), prefill="pipelined", mini_batch=25)
    d.prefill(40)
    assert d.gate(0, at=0, rows={5: 40}) == ["compute 1.0 0/5 1@0 0:25", "compute 1.0 0/5 1@0 25:40"]


def test_the_placement_is_told_rows_and_costs_and_who_is_there_or_on_the_way() -> None:
    placement = Takes()
    d = Driver(mixed=(3,), group=1, layers=1, residency=LastUsed(), placement=placement)
    d.do(t.WorkerJoined(1, 0, 0.0, 4.0, 2.0))
    d.do(t.WorkerJoined(2, 0, 0.0, 8.0, 4.0))
    d.do(t.WorkerJoined(3, 1, 5.0, 1.0, 0.5))  # worker 0 says nothing of its speed
    d.open()
    assert d.predict(0, 4) == ["load 0.0 0/4"]
    d.gate(0, rows={4: 2, 6: 1})
    assert placement.asked == [({6: 1}, {4: 2}, Costs(5.0, 1.0, 0.5, 6.0, 3.0), False)]


def with_two_loads(placement: Takes) -> Driver:
    """Two prefetches in flight to worker 0 since 0 s. A load takes 5 s, one after the other; the host 3 s a row."""
    d = Driver(mixed=(2,), group=1, layers=1, residency=LastUsed(), placement=placement)
    d.do(t.WorkerJoined(1, 0, 0.0, 0.0, 3.0))
    d.do(t.WorkerJoined(2, 1, 5.0, 1.0, 0.5))
    d.open()
    assert d.predict(0, 4, 6) == ["load 0.0 0/4", "load 0.1 0/6"]
    return d


@pytest.mark.parametrize(
    ("now", "rows", "missing"),
    [(1.0, {4: 1, 6: 1}, {4, 6}), (2.0, {4: 1, 6: 1}, {6}), (4.0, {4: 1, 6: 2}, set()), (99.0, {4: 1, 6: 1}, {6})],
    ids=["4 s and 9 s", "3 s and 8 s", "1 s and 6 s, two rows", "overdue, and 5 s"],
)
def test_a_load_that_ends_after_the_host_would_be_done_is_a_miss(
    now: float, rows: dict[int, int], missing: set[int]
) -> None:
    """A case's name says what is left of the two loads."""
    placement = Takes()
    d = with_two_loads(placement)
    d.now = now
    d.gate(0, rows=rows)
    assert [set(told) for told in placement.asked[0][:2]] == [missing, set(rows) - missing]


def test_the_next_load_is_under_way_when_the_one_before_has_ended() -> None:
    placement = Takes()
    d = with_two_loads(placement)
    d.now = 6.0
    d.loaded(0)
    d.now = 8.0
    d.gate(0, 4, 6)
    assert placement.asked[0][:2] == ({}, {4: 1, 6: 1}), "3 s are left of it"


def test_a_prediction_that_waits_for_a_slot_is_missing() -> None:
    placement = Takes()
    d = place(placement, mixed=(1, 0))
    d.open()
    d.predict(0, 4, 6)
    d.gate(0, 4, 6)
    assert placement.asked[0][:2] == ({6: 1}, {4: 1})


def test_predictions_of_what_the_host_computes_are_over() -> None:
    """Loaded, loading or queued: the slot is for others."""
    d = place(Takes(3, 5, 6), mixed=(2, 0))
    d.open()
    assert d.predict(0, 3, 5, 6) == ["load 0.0 0/3", "load 0.1 0/5"]
    assert d.predict(1, 1, 2) == []
    d.loaded(0)
    assert d.gate(0, 3, 5, 6) == [
        "evict 0.0 0/3",
        "evict 0.1 0/5",
        *compute("1.0 0/3", "1.0 0/5", "1.0 0/6", last=False),
        "load 0.0 1/1",
        "load 0.1 1/2",
    ]
    assert d.computed(1, 1, 1) == [f"resume 1@{P} layer 0"]
    assert (d.stats().unused, d.stats().present, d.stats().preempted) == (0, 1, 0)


def test_the_host_place_with_the_least_to_do_computes() -> None:
    d = place(HostOnly(), mixed=(1, 0, 0))
    d.open()
    assert d.gate(0, 1, 2, 3) == compute("1.0 0/1", "2.0 0/2", "1.0 0/3", last=False)


def test_what_fails_at_the_host_is_loaded_and_computed_on_the_device() -> None:
    d = place(HostOnly())
    d.open()
    d.now = 1.0
    d.gate(0, 3, 5)
    failed = d.calls[1, 0].pop(0).call_id
    d.now = 4.0
    assert d.do(t.ComputeFailed(failed, "nan")) == ["load 0.0 0/3", *compute("0.0 0/3")]
    assert d.do(t.ComputeFailed(failed, "nan")) == []
    d.now = 6.0
    d.loaded(0)
    assert d.computed(1) == []
    assert d.computed(0) == [f"resume 1@{P} layer 0"]
    assert (d.stats().host_calls, d.stats().loads, d.stats().reloads, d.stats().stall_s) == (1, 1, 0, 5.0)


def test_a_host_that_is_lost_leaves_its_work_to_the_device() -> None:
    d = place(HostOnly(), mini_batch=2)
    d.open()
    d.gate(0, rows={3: 3})
    first = d.calls[1, 0][0].call_id
    assert d.computed(1) == []
    assert d.lose(1) == ["load 0.0 0/3", *compute("0.0 0/3", rows="0:2", last=False), *compute("0.0 0/3", rows="2:3")]
    assert d.do(t.ComputeEnded(first)) == []
    d.loaded(0)
    assert d.computed(0, 0) == [f"resume 1@{P} layer 0"]
    assert d.gate(1, 4) == ["load 0.0 1/4", *compute("0.0 1/4")]  # nobody asks the placement any more
    assert d.stats().host_calls == 0


def test_a_host_goes_on_while_the_last_device_is_missing() -> None:
    d = place(Takes(5))
    d.open()
    assert d.lose(0) == []
    assert d.core.shortfall == "the last worker is gone: cable"
    assert d.gate(0, 3, 5) == compute("1.0 0/5", last=False)
    assert d.computed(1) == []
    assert d.do(t.WorkerJoined(0, 2)) == ["load 0.0 0/3", *compute("0.0 0/3")]
    assert d.computed(0) == [f"resume 1@{P} layer 0"]


def test_a_host_that_is_lost_while_no_device_is_there_leaves_its_work_waiting() -> None:
    d = place(HostOnly())
    d.open()
    assert d.lose(0) == []
    assert d.gate(0, 3) == compute("1.0 0/3", last=False)
    assert d.lose(1, "power") == []
    assert d.core.shortfall == "the last worker is gone: cable"  # a host place is none
    assert d.core.snapshot().waiting == (t.ExpertId(0, 3),)
    assert d.do(t.WorkerJoined(1, 0)) == []
    assert d.do(t.WorkerJoined(0, 2)) == ["load 0.0 0/3", *compute("0.0 0/3")]


def test_a_request_that_is_closed_takes_its_work_at_the_host_along() -> None:
    d = place(HostOnly())
    d.open()
    d.gate(0, 3)
    owed = d.calls[1, 0][0].call_id
    assert d.do(t.RequestClosed(1)) == ["unfollow 1"]
    assert d.do(t.ComputeEnded(owed)) == []
    assert d.do(t.ComputeFailed(owed, "x")) == []
    assert not d.core.snapshot().workers[1].hosted


def test_a_host_joins_in_the_middle() -> None:
    d = place(ResidentOnly(), mixed=(2,))
    d.open()
    assert d.gate(0, 3) == ["load 0.0 0/3", *compute("0.0 0/3")]
    d.loaded(0)
    d.computed(0)
    d.do(t.WorkerJoined(7, 0))
    d.hosts |= {7}
    assert d.gate(1, 3) == compute("7.0 1/3", last=False)


@pytest.mark.parametrize("prefill", ["ahead", "pipelined", "in-turn"])
def test_in_prefill_the_host_takes_its_part_and_waits_for_no_load(prefill: str) -> None:
    placement = Takes(1)
    d = place(placement, mixed=(4, 0), prefill=prefill, experts=4, mini_batch=2, layers=1)
    d.open(1, 5, decode=False)
    begun = d.do(t.StepStarted((t.Pass(1, 0, 5, prefill=True),)))
    assert begun == (["load 0.0 0/0", "load 0.1 0/1"] if prefill == "ahead" else [])
    out = d.gate(0, at=0, rows={0: 1, 1: 3})
    hosted = compute("1.0 0/1", at="1@0", rows="0:2", last=False) + compute("1.0 0/1", at="1@0", rows="2:3", last=False)
    assert [x for x in out if " 1.0 " in x] == hosted
    assert placement.asked[0][3]
    d.loaded(0)
    assert d.computed(1, 1) == []
    assert d.computed(0) == ["resume 1@0 layer 0"]
    assert (d.stats().host_calls, d.stats().decode_host_calls) == (1, 0)
