"""What fails, exact decisions: it is tried again elsewhere, and not for ever."""

from __future__ import annotations

import pytest

from scheduler import types as t
from scheduler.core.machine import MAX_FAILURES
from support.scheduling.core_driver import Driver, P, compute


def test_a_failed_load_is_tried_on_another_worker() -> None:
    d = Driver(workers=3, group=1)
    d.open()
    d.predict(0, 3)
    assert d.load_failed(0) == ["evict 0.0 0/3", "load 1.0 0/3"]
    assert d.load_failed(1) == ["evict 1.0 0/3", "load 0.0 0/3"]
    assert d.gate(0, 3) == compute("0.0 0/3")
    assert d.computed(0) == [f"resume 1@{P} layer 0"]


def test_an_expert_that_fails_too_often_fails_its_request_only() -> None:
    d = Driver(workers=1, group=1, layers=2)
    d.open(1)
    d.open(2)
    d.predict(0, 3)
    d.predict(1, 4, request=2)
    d.gate(0, 3)
    for _ in range(MAX_FAILURES - 1):
        assert d.load_failed(0, "checksum") == ["evict 0.0 0/3", "load 0.0 0/3", *compute("0.0 0/3")]
    failed = f"fail 1: expert 3 of layer 0 failed {MAX_FAILURES} times: checksum"
    assert d.load_failed(0, "checksum") == ["evict 0.0 0/3", "unfollow 1", failed, "load 0.0 1/4"]
    assert d.gate(1, 4, request=2) == compute("0.0 1/4", at=f"2@{P}")
    assert d.computed(0) == [f"resume 2@{P} layer 1"]


def test_a_prediction_that_cannot_be_loaded_costs_time_only() -> None:
    d = Driver(workers=1, group=1, layers=2)
    d.open()
    d.predict(0, 3)
    for _ in range(MAX_FAILURES - 1):
        assert d.load_failed(0, "no such expert") == ["evict 0.0 0/3", "load 0.0 0/3"]
    assert d.load_failed(0, "no such expert") == ["evict 0.0 0/3"]
    assert d.gate(0, 3) == ["load 0.0 0/3", *compute("0.0 0/3")]
    assert d.core.stats[1].reloads == 0
    assert d.computed(0) == [f"resume 1@{P} layer 0"]


def test_a_failed_prediction_that_a_later_one_has_replaced_is_none() -> None:
    d = Driver(workers=1, group=1, layers=2)
    d.open()
    d.predict(0, 3)
    for _ in range(MAX_FAILURES):
        d.load_failed(0)
    assert d.predict(0, 4) == ["load 0.0 0/4"]
    assert d.gate(0, 3) == ["evict 0.0 0/4", "load 0.0 0/3", *compute("0.0 0/3")]
    assert d.core.stats[1].reloads == 1


def test_an_event_that_cannot_be_leaves_nothing_for_the_next() -> None:
    d = Driver(workers=2, experts=4, layers=2, prefill="pipelined")
    d.validates = False  # the event has changed some of the books
    d.prefill()
    with pytest.raises(IndexError):
        d.gate(0, at=0, rows={1: 2, 9: 1})
    assert d.do(t.TokenDecoded(99, 0)) == []


def test_what_prefill_has_let_go_is_not_assigned_again_before_its_gate() -> None:
    d = Driver(workers=1, slots=2, experts=1, layers=3)
    assert d.prefill() == ["load 0.0 0/0", "load 0.1 1/0"]
    d.loaded(0)
    for _ in range(MAX_FAILURES - 1):
        assert d.do(t.LoadFailed(d.in_slots[0, 1].load_id, "disk")) == ["evict 0.1 1/0", "load 0.1 1/0"]
    assert d.do(t.LoadFailed(d.in_slots[0, 1].load_id, "disk")) == ["evict 0.1 1/0", "load 0.1 2/0"]
    assert d.gate(0, at=0, rows={0: 1}) == compute("0.0 0/0", at="1@0")
    assert d.computed(0) == ["resume 1@0 layer 0"]
    assert d.gate(1, at=0, rows={0: 1}) == [
        "evict 0.1 2/0",
        "load 0.0 1/0",
        *compute("0.0 1/0", at="1@0"),
        "load 0.1 2/0",
    ]
    assert d.computed(0) == ["resume 1@0 layer 1"]
    assert (d.stats().reloads, d.stats().preempted) == (0, 1)


def test_a_failed_computation_is_loaded_and_computed_again_in_full() -> None:
    d = Driver(workers=2, group=1, experts=2, mini_batch=2)
    d.open()
    d.gate(0, rows={1: 5})
    d.loaded(0)
    first, second, third = d.calls[0, 0]
    d.computed(0)
    again = [f"compute 1.0 0/1 1@{P} {r}" for r in ("0:2", "2:4", "4:5 last")]
    assert d.do(t.ComputeFailed(second.call_id, "nan")) == ["evict 0.0 0/1", "load 1.0 0/1", *again]
    assert d.do(t.ComputeEnded(third.call_id)) == []
    assert d.do(t.ComputeFailed(third.call_id, "late")) == []
    assert d.do(t.ComputeEnded(first.call_id)) == []
    assert d.computed(1, 1) == []
    assert d.computed(1) == [f"resume 1@{P} layer 0"]
    assert d.in_slots == {}


def test_computations_that_fail_too_often_fail_the_request() -> None:
    d = Driver(workers=2, group=1)
    d.open()
    d.gate(0, 3)
    for n in range(MAX_FAILURES):
        out = d.do(t.ComputeFailed(d.calls[n % 2, 0][0].call_id, "out of memory"))
    assert out == [
        "evict 0.0 0/3",
        "unfollow 1",
        f"fail 1: expert 3 of layer 0 failed {MAX_FAILURES} times: out of memory",
    ]
    assert d.in_slots == {}


def test_facts_about_what_is_over_are_ignored() -> None:
    d = Driver(workers=2)
    d.open()
    d.predict(0, 3, 5)
    dropped = d.in_slots[1, 0].load_id
    d.gate(0, 3)
    call = d.calls[0, 0][0].call_id
    d.computed(0)
    done = [
        t.LoadEnded(dropped, 10),
        t.LoadFailed(dropped, "x"),
        t.ComputeEnded(call),
        t.ComputeFailed(call, "x"),
        t.LoadEnded(987),
        t.LoadFailed(987, "x"),
        t.ComputeEnded(987),
        t.ComputeFailed(987, "x"),
        t.WorkerLost(9, "x"),
        t.RequestClosed(9),
        t.TokenDecoded(9, 0),
        t.StepStarted((t.Pass(9, 0, 4, True),)),
        t.GateFired(t.Visit(9, 0, 0), ((1, 1),)),
        t.Predicted(9, 0, 0, (1,)),
    ]
    assert [d.do(event) for event in done] == [[]] * len(done)
    assert d.stats().bytes_loaded == 0


def test_a_result_before_the_word_of_its_load_says_that_it_was_loaded() -> None:
    d = Driver(workers=1, group=1)
    d.open()
    d.now = 1.0
    d.gate(0, 3)
    load = d.in_slots[0, 0].load_id
    d.now = 4.0
    assert d.computed(0) == [f"resume 1@{P} layer 0"]
    assert d.do(t.LoadEnded(load, 10)) == []
    assert d.stats().stall_s == 3.0
