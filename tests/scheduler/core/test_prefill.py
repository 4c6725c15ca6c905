"""Prefill, exact decisions: loads ahead of gates, or layer by layer in turn."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from scheduler import types as t
from scheduler.policies.residency.base import Everything
from support.scheduling.core_driver import Driver, in_place, line


def finish_prefill(d: Driver, layers: range, experts: int) -> list[str]:
    """Fires gates, ends every load and computation: what was loaded, as `worker layer/expert`."""
    lines: list[str] = []
    for layer in layers:
        if not any(d.calls.values()):
            lines += d.gate(layer, at=0, rows=dict.fromkeys(range(experts), 1))
        while any(d.calls.values()):
            worker = min(place[0] for place, calls in d.calls.items() if calls)
            lines += d.loaded(worker) + d.computed(worker)
    return [x.removeprefix("load ").replace(".0", "") for x in lines if x.startswith("load")]


def test_prefill_gives_each_worker_one_expert_of_every_layer() -> None:
    """Section 3.3 on the paper's testbed: 8 experts, 8 workers."""
    d = Driver(workers=8, experts=8, layers=3)
    assert d.prefill() == [f"load {e}.0 0/{e}" for e in range(8)]
    d.loaded(*range(8))
    for layer in range(3):
        assert d.where == {e: (layer, e) for e in range(8)}
        out = d.gate(layer, at=0, rows=dict.fromkeys(range(8), 4))
        assert out == [f"compute {e}.0 {layer}/{e} 1@0 0:4 last" for e in range(8)]
        for e in range(8):  # a worker that is done loads for the next layer at once
            ahead = [f"load {e}.0 {layer + 1}/{e}"] if layer < 2 else []
            assert d.computed(e) == [f"resume 1@0 layer {layer}"] * (e == 7) + ahead
    assert d.in_slots == {}
    stats = d.stats()
    assert (stats.loads, stats.decode_loads, stats.reloads, stats.unused) == (24, 0, 0, 0)
    assert stats.by_index == []  # no predictions in prefill, so no recall either


def test_prefill_loads_only_experts_that_a_layer_has() -> None:
    """Layers of two, four and one expert."""
    d = Driver(workers=4, experts=4, layers=3, by_layer=(2, 4, 1))
    assert d.prefill() == ["load 0.0 0/0", "load 1.0 0/1", "load 2.0 1/2", "load 3.0 1/3"]
    later = {line.split()[-1] for line in finish_prefill(d, range(3), 1)}
    assert later == {"1/0", "1/1", "2/0"}
    assert d.in_slots == {}


def test_prefill_drops_what_is_not_activated_and_loads_ahead_in_its_place() -> None:
    d = Driver(workers=4, experts=4, layers=3)
    assert d.prefill() == ["load 0.0 0/0", "load 1.0 0/1", "load 2.0 0/2", "load 3.0 0/3"]
    d.loaded(0, 1, 2)
    assert d.gate(0, at=0, rows={0: 3, 2: 5}) == [
        "evict 1.0 0/1",
        "evict 3.0 0/3",
        "compute 0.0 0/0 1@0 0:3 last",
        "compute 2.0 0/2 1@0 0:5 last",
        "load 1.0 1/1",
        "load 3.0 1/3",
    ]
    assert d.computed(0) == ["load 0.0 1/0"]
    assert d.computed(2) == ["resume 1@0 layer 0", "load 2.0 1/2"]
    assert d.gate(1, at=0, rows={1: 1, 3: 1}) == [
        "evict 0.0 1/0",
        "evict 2.0 1/2",
        "compute 1.0 1/1 1@0 0:1 last",
        "compute 3.0 1/3 1@0 0:1 last",
        "load 0.0 2/0",
        "load 2.0 2/2",
    ]
    assert (d.stats().unused, d.stats().reloads) == (4, 0)


def test_prefill_with_more_experts_than_workers_shares_them_evenly() -> None:
    d = Driver(workers=3, experts=4, layers=3, slots=1)
    assert d.prefill() == ["load 0.0 0/0", "load 1.0 0/1", "load 2.0 0/2"]
    loads = ["0 0/0", "1 0/1", "2 0/2", *finish_prefill(d, range(3), 4)]
    # 12 experts, 3 workers: four each, the start of each layer moved on by one.
    assert sorted(loads) == [
        "0 0/0",
        "0 0/3",
        "0 1/2",
        "0 2/1",
        "1 0/1",
        "1 1/0",
        "1 1/3",
        "1 2/2",
        "2 0/2",
        "2 1/1",
        "2 2/0",
        "2 2/3",
    ]
    assert (d.in_slots, d.stats().reloads) == ({}, 0)


@pytest.mark.parametrize(
    ("mini_batch", "ranges"),
    [
        (4, ["0:4", "4:8", "8:10 last"]),
        (5, ["0:5", "5:10 last"]),
        (9, ["0:9", "9:10 last"]),
        (10, ["0:10 last"]),
        (128, ["0:10 last"]),
        (1, [*(f"{i}:{i + 1}" for i in range(9)), "9:10 last"]),
    ],
)
def test_mini_batches_tile_the_rows_and_only_the_last_evicts(mini_batch: int, ranges: list[str]) -> None:
    d = Driver(workers=1, experts=1, layers=2, mini_batch=mini_batch)
    assert d.prefill() == ["load 0.0 0/0"]
    d.loaded(0)
    assert d.gate(0, at=0, rows={0: 10}) == [f"compute 0.0 0/0 1@0 {r}" for r in ranges]
    for _ in ranges[:-1]:
        assert d.computed(0) == []
    assert d.computed(0) == ["resume 1@0 layer 0", "load 0.0 1/0"]


@pytest.mark.parametrize(
    ("rows", "parts"),
    [(1, [1]), (16, [16]), (17, [16, 1]), (128, [16] * 8), (129, [17] * 7 + [10]), (1000, [125] * 8)],
)
def test_parts_of_no_given_size_have_sixteen_rows_and_are_eight_at_most(rows: int, parts: list[int]) -> None:
    d = Driver(workers=1, experts=1, layers=1, mini_batch=None)
    d.prefill()
    d.loaded(0)
    ends = list(itertools.accumulate(parts, initial=0))
    ranges = [f"{start}:{stop}" for start, stop in itertools.pairwise(ends)]
    assert d.gate(0, at=0, rows={0: rows}) == [
        *(f"compute 0.0 0/0 1@0 {r}" for r in ranges[:-1]),
        f"compute 0.0 0/0 1@0 {ranges[-1]} last",
    ]


def test_prefill_stalls_are_kept_apart() -> None:
    d = Driver(workers=1, experts=1, layers=1)
    d.prefill()
    d.now = 2.0
    d.gate(0, at=0, rows={0: 4})
    d.now = 9.0
    d.loaded(0)
    assert (d.stats().stall_s, d.stats().prefill_stall_s) == (0.0, 7.0)


def test_a_worker_lost_in_prefill_does_not_have_a_layer_assigned_twice() -> None:
    """With 5 workers two layers of 4 experts are assigned ahead, with 4 workers one."""
    d = Driver(workers=5, experts=4, layers=5)
    loads = [x.removeprefix("load ").replace(".0", "") for x in d.prefill()]
    d.gate(0, at=0, rows=dict.fromkeys(range(4), 1))
    assert d.lose(4) == []  # its expert 0 of layer 1 goes to a worker that is busy
    loads += finish_prefill(d, range(5), 4)
    assert d.in_slots == {}
    everything = [f"{layer}/{expert}" for layer in range(5) for expert in range(4)]
    assert sorted(x.split()[1] for x in loads) == sorted([*everything, "1/0"])
    assert d.stats().reloads == 0
    assert d.do(t.RequestClosed(1)) == ["unfollow 1"]  # and nothing to evict


def test_a_worker_that_joins_in_prefill_leaves_no_layer_out() -> None:
    d = Driver(workers=4, experts=4, layers=6)
    d.prefill()
    d.do(t.WorkerJoined(4, 1))
    finish_prefill(d, range(6), 4)
    assert (d.stats().loads, d.stats().reloads, d.in_slots) == (24, 0, {})


# --- in turn ----------------------------------------------------------------------------------------------------------


def in_turn(**fields: Any) -> Driver:
    return Driver(**({"prefill": "in-turn", "shadow": False} | fields))


def test_in_turn_a_layer_loads_after_its_gate_and_is_sent_when_all_have_ended() -> None:
    d = in_turn(workers=4, layers=2, experts=4, mini_batch=4)
    assert d.prefill() == []
    assert d.gate(0, at=0, rows={0: 16, 1: 6, 3: 4}) == ["load 0.0 0/0", "load 1.0 0/1", "load 3.0 0/3"]
    d.now = 25.0
    assert d.loaded(0, 3) == []
    d.now = 26.0
    assert d.loaded(1) == [
        *in_place("0.0 0/0", at="1@0", rows="0:4"),
        *in_place("0.0 0/0", at="1@0", rows="4:8"),
        *in_place("0.0 0/0", at="1@0", rows="8:12"),
        "compute 0.0 0/0 1@0 12:16 last",
        *in_place("1.0 0/1", at="1@0", rows="0:4"),
        "compute 1.0 0/1 1@0 4:6 last",
        "compute 3.0 0/3 1@0 0:4 last",
    ]
    assert d.computed(0, 0, 0, 0, 1, 1) == []
    assert d.computed(3) == ["resume 1@0 layer 0"]
    assert d.gate(1, at=0, rows={2: 1}) == ["load 2.0 1/2"]
    assert d.loaded(2) == ["compute 2.0 1/2 1@0 0:1 last"]
    assert d.computed(2) == ["resume 1@0 layer 1"]
    stats = d.stats()
    assert (stats.loads, stats.reloads, stats.unused, stats.prefill_stall_s) == (4, 0, 0, 26.0)
    d.token(0, prompt=16)
    assert d.gate(0, 3, at=16)[0].startswith("load")  # decoding is as ever: rows travel while the expert loads
    assert [line(c) for c in d.raw][1].startswith("compute")
    assert d.stats().reloads == 1


def test_in_turn_experts_that_find_no_slot_go_after_those_that_do() -> None:
    d = in_turn(workers=2, layers=1, experts=4)
    d.prefill()
    assert d.gate(0, at=0, rows=dict.fromkeys(range(4), 2)) == ["load 0.0 0/0", "load 1.0 0/1"]
    assert d.loaded(0) == []
    assert d.loaded(1) == ["compute 0.0 0/0 1@0 0:2 last", "compute 1.0 0/1 1@0 0:2 last"]
    assert d.computed(1) == ["load 1.0 0/3"]
    assert d.computed(0) == ["load 0.0 0/2"]
    assert d.loaded(1) == []
    assert d.loaded(0) == ["compute 0.0 0/2 1@0 0:2 last", "compute 1.0 0/3 1@0 0:2 last"]
    assert d.computed(0, 1) == ["resume 1@0 layer 0"]


def test_in_turn_a_loss_does_not_hold_up_what_has_its_slot() -> None:
    """The lost worker's expert must wait for the other's slot, which must be left first."""
    d = in_turn(workers=2, layers=1, experts=2)
    d.prefill()
    d.gate(0, at=0, rows={0: 2, 1: 2})
    assert d.loaded(0) == []
    assert d.lose(1) == ["compute 0.0 0/0 1@0 0:2 last"]
    assert d.computed(0) == ["load 0.0 0/1"]
    assert d.loaded(0) == ["compute 0.0 0/1 1@0 0:2 last"]
    assert d.computed(0) == ["resume 1@0 layer 0"]


def test_in_turn_what_is_there_already_waits_for_the_rest_or_for_nothing() -> None:
    d = in_turn(workers=2, slots=1, layers=1, experts=2, residency=Everything())
    d.prefill()
    assert d.gate(0, at=0, rows={0: 2}) == ["load 0.0 0/0"]
    assert d.loaded(0) == in_place("0.0 0/0", at="1@0", rows="0:2")
    d.computed(0)
    d.do(t.RequestClosed(1))
    d.prefill(request=2)
    assert d.gate(0, at=0, request=2, rows={0: 2, 1: 2}) == ["load 1.0 0/1"]
    assert d.loaded(1) == in_place("0.0 0/0", "1.0 0/1", at="2@0", rows="0:2")
    d.computed(0, 1)
    d.prefill(request=3)
    assert d.gate(0, at=0, request=3, rows={1: 2}) == in_place("1.0 0/1", at="3@0", rows="0:2")
    assert d.computed(1) == ["resume 3@0 layer 0"]
    assert (d.stats(2).loads, d.stats(2).reused, d.stats(3).reused) == (1, 1, 1)
