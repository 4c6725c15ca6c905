"""Workers that are lost, exact decisions: what they held, loaded and computed goes elsewhere."""

from __future__ import annotations

from scheduler import types as t
from support.scheduling.core_driver import Driver, P, compute


def test_an_idle_worker_is_lost_without_consequence() -> None:
    d = Driver(workers=3)
    d.open()
    assert d.lose(1) == []
    assert d.core.workers == [0, 2]
    assert d.lose(1) == []
    assert d.predict(0, 3, 5) == ["load 0.0 0/3", "load 2.0 0/5"]


def test_what_a_lost_worker_was_loading_is_loaded_elsewhere() -> None:
    d = Driver(workers=4, group=2)
    d.open()
    d.predict(0, 3, 5)
    assert d.lose(0) == ["load 2.0 0/3"]  # worker 1 is taken, 2 is free
    assert d.gate(0, 3, 5) == compute("2.0 0/3", "1.0 0/5")
    assert d.computed(2, 1) == [f"resume 1@{P} layer 0"]
    assert (d.stats().loads, d.stats().reloads) == (3, 0)


def test_what_a_lost_worker_was_computing_is_computed_elsewhere_once() -> None:
    d = Driver(workers=4, group=2, mini_batch=1)
    d.open()
    d.predict(0, 3, 5)
    stale_load = d.in_slots[0, 0].load_id
    d.gate(0, rows={3: 2, 5: 1})
    d.loaded(0, 1)
    first, second = d.calls[0, 0]
    assert d.computed(0) == []  # one of its two rows is back
    assert d.lose(0) == ["load 2.0 0/3", f"compute 2.0 0/3 1@{P} 0:1", f"compute 2.0 0/3 1@{P} 1:2 last"]
    for stale in (t.ComputeEnded(first.call_id), t.ComputeEnded(second.call_id), t.LoadEnded(stale_load, 10)):
        assert d.do(stale) == []
    assert d.computed(1) == []
    d.loaded(2)
    assert d.computed(2) == []
    assert d.computed(2) == [f"resume 1@{P} layer 0"]
    assert (d.in_slots, d.stats().bytes_loaded) == ({}, 30)


def test_what_a_lost_worker_had_still_to_load_goes_elsewhere_named_before_predicted() -> None:
    d = Driver(workers=2, group=1, layers=4)
    d.open()
    d.predict(0, 1, 2)  # worker 0, one after the other
    d.predict(1, 3)  # worker 1
    d.predict(2, 4)  # worker 0
    d.gate(0, 1, 2)
    assert d.lose(0) == ["evict 1.0 1/3", "load 1.0 0/1", *compute("1.0 0/1")]
    assert d.computed(1) == ["load 1.0 0/2", *compute("1.0 0/2")]
    assert d.computed(1) == [f"resume 1@{P} layer 0", "load 1.0 1/3"]
    assert d.gate(1, 3) == compute("1.0 1/3")
    assert d.computed(1) == [f"resume 1@{P} layer 1", "load 1.0 2/4"]


def test_a_worker_that_joins_again_takes_part_again() -> None:
    d = Driver(workers=2, group=2)
    d.open()
    d.predict(0, 3, 5)
    assert d.lose(1) == []  # worker 0's slot is taken
    assert d.do(t.WorkerJoined(1, 1)) == []
    assert d.gate(0, 3, 5) == compute("0.0 0/3")
    assert d.computed(0) == ["load 0.0 0/5", *compute("0.0 0/5")]
    assert d.predict(1, 6, 7) == ["load 1.0 1/7"]


def test_a_loss_stalls_until_the_last_load_and_counts_each_second_once() -> None:
    d = Driver(workers=2, group=1)
    d.open()
    d.now = 100.0
    d.gate(0, 3)
    d.now = 101.0
    d.loaded(0)
    assert d.stats().stall_s == 1.0
    d.now = 102.0
    d.lose(0)
    d.now = 104.0
    d.loaded(1)
    assert d.stats().stall_s == 4.0  # from the gate at 100 until the last load at 104
