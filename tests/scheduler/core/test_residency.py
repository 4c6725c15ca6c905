"""What stays in slots, exact decisions: everything in homes of its own, or what a policy that evicts lets stay."""

from __future__ import annotations

from collections import OrderedDict
from random import Random
from typing import Any

import pytest

from scheduler import types as t
from scheduler.core.groups import RoundRobin
from scheduler.core.holders import Holders
from scheduler.core.homes import Homes
from scheduler.core.machine import MAX_FAILURES
from scheduler.errors import ConfigError
from scheduler.policies.residency.base import Everything, NoCache
from scheduler.types import ExpertId
from support.scheduling.core_driver import Driver, P, in_place
from support.scheduling.policies import LastUsed

# --- everything stays -------------------------------------------------------------------------------------------------


def full(**fields: Any) -> Driver:
    return Driver(**({"residency": Everything(), "shadow": False} | fields))


def test_what_stays_is_loaded_once_and_computed_where_it_is() -> None:
    d = full(workers=2, slots=2, layers=2, experts=2)
    assert d.prefill() == ["load 0.0 0/0", "load 0.1 1/0", "load 1.0 0/1", "load 1.1 1/1"]
    for worker, slot in d.in_slots:
        d.loaded(worker, slot=slot)
    for layer in range(2):
        out = d.gate(layer, at=0, rows={0: 16, 1: 16})
        assert out == in_place(f"0.{layer} {layer}/0", f"1.{layer} {layer}/1", at="1@0", rows="0:16")
        assert d.computed(0, 1, slot=layer) == [f"resume 1@0 layer {layer}"]
    assert (d.stats().loads, d.stats().reused, len(d.in_slots)) == (4, 0, 4)
    d.token(0, prompt=16)
    for layer in range(2):
        assert d.gate(layer, 1, at=16) == in_place(f"1.{layer} {layer}/1", at="1@16")
        assert d.computed(1, slot=layer) == [f"resume 1@16 layer {layer}"]
    assert (d.stats().loads, d.stats().reused, d.stats().decode_reused) == (4, 2, 2)
    assert (d.stats().reloads, d.stats().stall_s, len(d.in_slots)) == (0, 0.0, 4)
    assert d.do(t.RequestClosed(1)) == []
    assert d.prefill(request=2) == []  # the next request finds all of them
    assert d.gate(0, at=0, request=2, rows={0: 1}) == in_place("0.0 0/0", at="2@0")


def test_an_expert_that_is_not_there_is_loaded_by_whoever_names_it_first() -> None:
    d = full(workers=2, slots=2, layers=2, experts=2)
    d.open()
    assert d.gate(1, 0) == ["load 0.0 1/0", *in_place("0.0 1/0")]
    d.loaded(0)
    assert d.computed(0) == [f"resume 1@{P} layer 1"]
    d.token(1)
    assert d.gate(1, 0, 1, at=P + 1) == [
        *in_place("0.0 1/0", at=f"1@{P + 1}"),
        "load 1.0 1/1",
        *in_place("1.0 1/1", at=f"1@{P + 1}"),
    ]
    assert d.computed(0, 1) == [f"resume 1@{P + 1} layer 1"]
    assert (d.stats().loads, d.stats().reloads, d.stats().reused) == (2, 2, 1)


def test_a_wrong_prediction_stays_and_its_load_goes_on() -> None:
    d = full(workers=4, slots=2, layers=1, experts=8, shadow=True)
    d.open()
    assert d.predict(0, 5, 6) == ["load 1.0 0/5", "load 2.0 0/6"]  # their homes, whosever turn it is
    assert d.gate(0, 5, 7) == [*in_place("1.0 0/5"), "load 3.0 0/7", *in_place("3.0 0/7")]
    assert d.loaded(1, 2, 3) == []
    assert d.computed(1, 3) == [f"resume 1@{P} layer 0"]
    assert (d.stats().unused, d.stats().overall.recall) == (1, 0.5)
    assert d.predict(0, 6, 5, at=P + 1) == []
    assert d.gate(0, 5, 6, at=P + 1) == in_place("1.0 0/5", "2.0 0/6", at=f"1@{P + 1}")
    assert d.computed(1, 2) == [f"resume 1@{P + 1} layer 0"]
    assert d.predict(0, 1, at=P + 2) == ["load 1.1 0/1"]
    assert d.gate(0, at=P + 2) == [f"resume 1@{P + 2} layer 0"]
    assert (d.stats().loads, d.stats().reused, d.stats().unused, d.stats().bytes_loaded) == (4, 2, 2, 30)


def test_two_requests_share_an_expert_in_its_one_slot() -> None:
    d = full(workers=1, slots=2, layers=1, experts=2)
    d.open(1)
    d.open(2)
    assert d.gate(0, 0, request=1) == ["load 0.0 0/0", *in_place("0.0 0/0")]
    d.now = 3.0
    assert d.gate(0, 0, request=2) == in_place("0.0 0/0", at=f"2@{P}")
    d.now = 5.0
    assert d.loaded(0) == []
    assert (d.stats(1).stall_s, d.stats(2).stall_s) == (5.0, 2.0)
    assert d.do(t.RequestClosed(1)) == []
    first, second = d.calls[0, 0]
    assert d.do(t.ComputeEnded(first.call_id)) == []
    assert d.do(t.ComputeEnded(second.call_id)) == [f"resume 2@{P} layer 0"]
    assert (d.stats(1).loads, d.stats(2).loads, d.stats(2).reused) == (1, 0, 1)


def test_a_shared_load_that_fails_is_tried_again_once_for_all() -> None:
    d = full(workers=2, slots=1, layers=1, experts=2)
    d.open(1)
    d.open(2)
    d.gate(0, 0, request=1)
    d.gate(0, 0, request=2)
    both = [*in_place("0.0 0/0"), *in_place("0.0 0/0", at=f"2@{P}")]
    assert d.load_failed(0) == ["evict 0.0 0/0", "load 0.0 0/0", *both]  # at home, though worker 1 is free
    d.loaded(0)
    failed = d.calls[0, 0][0].call_id
    assert d.do(t.ComputeFailed(failed, "nan")) == ["evict 0.0 0/0", "load 0.0 0/0", *both]
    assert d.stats(2).loads == 0
    assert MAX_FAILURES == 3
    often = "expert 0 of layer 0 failed 3 times: disk"
    # It has failed once less for request 2, whose computation never did.
    assert d.load_failed(0) == [f"fail 1: {often}", "evict 0.0 0/0", "load 0.0 0/0", *in_place("0.0 0/0", at=f"2@{P}")]
    assert d.load_failed(0) == ["evict 0.0 0/0", f"fail 2: {often}"]
    assert d.in_slots == {}


def test_a_load_that_failed_for_nobody_is_forgotten() -> None:
    d = full(workers=1, slots=2, layers=1, experts=2, shadow=True)
    d.open()
    assert d.predict(0, 1) == ["load 0.0 0/1"]
    assert d.gate(0) == [f"resume 1@{P} layer 0"]
    assert d.load_failed(0) == ["evict 0.0 0/1"]
    assert d.predict(0, 1, at=P + 1) == ["load 0.0 0/1"]


def test_too_few_slots_hold_the_request_up_and_say_how_many_are_needed() -> None:
    d = full(workers=3, slots=2, layers=2, experts=4, by_layer=(4, 3))
    assert d.open() == []
    assert d.gate(0, 1) == []
    assert d.core.shortfall is not None
    assert d.core.shortfall.startswith("residency all keeps every expert")
    assert "7 slots are needed, 6 are there" in d.core.shortfall
    assert d.do(t.WorkerJoined(3, 1)) == ["load 1.0 0/1", *in_place("1.0 0/1")]
    assert d.core.shortfall is None
    shape = d.core.shape
    Everything().check(shape, 7)
    with pytest.raises(ConfigError, match="7 slots are needed, 6 are there"):
        Everything().check(shape, 6)
    NoCache().check(shape, 0)


def test_experts_of_a_lost_worker_find_another_home_and_nobody_else_moves() -> None:
    d = full(workers=3, slots=3, layers=2, experts=3)
    d.prefill()
    for worker, slot in list(d.in_slots):
        d.loaded(worker, slot=slot)
    assert d.gate(0, at=0, rows={1: 4}) == in_place("1.0 0/1", at="1@0", rows="0:4")
    # 0/1 was being computed and 1/1 is wanted by the plan: 0/1 takes worker 0's third slot, 1/1 worker 2's.
    assert d.lose(1) == ["load 0.2 0/1", *in_place("0.2 0/1", at="1@0", rows="0:4"), "load 2.2 1/1"]
    d.loaded(0, slot=2)
    assert d.computed(0, slot=2) == ["resume 1@0 layer 0"]
    assert (d.stats().loads, d.stats().reused) == (8, 0)
    assert d.do(t.WorkerJoined(1, 3)) == []  # everybody has a home: it stays empty
    assert d.gate(1, at=0, rows={0: 1, 1: 1}) == in_place("0.1 1/0", "2.2 1/1", at="1@0")


def test_a_loss_that_leaves_too_few_slots_holds_up_what_is_not_in_a_slot_until_workers_come() -> None:
    d = full(workers=2, slots=1, layers=1, experts=2)
    d.open()
    assert d.gate(0, 0, 1) == ["load 0.0 0/0", *in_place("0.0 0/0"), "load 1.0 0/1", *in_place("1.0 0/1")]
    assert d.lose(0) == []
    assert "2 slots are needed, 1 are there" in (d.core.shortfall or "")
    d.open(2)
    assert d.gate(0, 0, 1, request=2) == in_place("1.0 0/1", at=f"2@{P}")  # it is there, or will be
    d.loaded(1)
    assert d.computed(1, 1) == []
    assert d.do(t.WorkerJoined(7, 1)) == ["load 7.0 0/0", *in_place("7.0 0/0"), *in_place("7.0 0/0", at=f"2@{P}")]
    d.loaded(7)
    assert d.computed(7, 7) == [f"resume 1@{P} layer 0", f"resume 2@{P} layer 0"]


def test_of_workers_that_have_too_few_slots_waiting_fails_requests_all_the_same() -> None:
    d = full(workers=2, slots=1, layers=1, experts=2)
    d.open()
    d.gate(0, 0, 1)
    d.lose(0)
    assert d.do(t.WorkerWaitExpired("too long")) == ["fail 1: too long"]
    assert d.core.snapshot().visits == d.core.snapshot().calls == d.core.snapshot().waiting == ()
    assert d.where == {1: t.ExpertId(0, 1)}
    d.do(t.WorkerJoined(7, 1))
    d.open(2)
    assert d.gate(0, 0, 1, request=2) == [
        *in_place("1.0 0/1", at=f"2@{P}"),
        "load 7.0 0/0",
        *in_place("7.0 0/0", at=f"2@{P}"),
    ]


def test_experts_get_homes_when_a_request_needs_them_on_all_workers_that_have_joined_by_then() -> None:
    d = full(workers=4, slots=2, layers=1, experts=4)  # two would do
    d.prefill()
    assert sorted(d.where) == [0, 1, 2, 3]


@pytest.mark.parametrize(("workers", "layers", "experts"), [(8, 4, 8), (3, 5, 4), (5, 2, 8), (1, 3, 2)])
def test_homes_are_where_prefill_would_share_them_out(workers: int, layers: int, experts: int) -> None:
    homes = Homes(t.ModelShape(tuple(range(layers)), experts, 2), Holders())
    for worker in range(workers):
        homes.on_worker_joined(worker, -(-layers * experts // workers))
    homes.settle()
    for layer in range(layers):
        share = RoundRobin(2).share(range(workers), layer, experts)
        assert [homes.worker_of(ExpertId(layer, e)) for e in range(experts)] == share


def test_homes_fill_workers_of_any_size() -> None:
    homes = Homes(t.ModelShape((1, 3), 4, 2, by_layer=(4, 3)), Holders())
    for worker, slots in ((2, 1), (5, 4), (7, 2)):
        homes.on_worker_joined(worker, slots)
    homes.settle()
    everybody = [ExpertId(1, e) for e in range(4)] + [ExpertId(3, e) for e in range(3)]
    assert [homes.worker_of(expert) for expert in everybody] == [2, 5, 7, 5, 7, 5, 5]


# --- a policy that evicts ---------------------------------------------------------------------------------------------


def step(d: Driver, index: int, *experts: int) -> list[str]:
    """One decode pass through a model of one layer."""
    d.token(index)
    out = list(d.gate(0, *experts, at=P + index))
    for place in d.busy:
        call = d.calls[place].pop()
        d.do(t.LoadEnded(d.in_slots[place].load_id, 10))
        d.do(t.ComputeEnded(call.call_id))
    assert d.raw == [t.Resume(t.Visit(1, P + index, 0))]
    return [x for x in out if not x.startswith("compute")]


def test_a_policy_that_evicts_is_told_of_uses_and_asked_for_victims() -> None:
    policy = LastUsed()
    d = Driver(workers=1, slots=2, group=1, layers=1, experts=4, shadow=False, residency=policy)
    d.open()
    assert step(d, 1, 0) == ["load 0.0 0/0"]
    assert step(d, 2, 1) == ["load 0.1 0/1"]
    assert step(d, 3, 0) == []
    assert step(d, 4, 2) == ["evict 0.1 0/1", "load 0.1 0/2"]
    assert step(d, 5, 0) == []
    assert step(d, 6, 3) == ["evict 0.1 0/2", "load 0.1 0/3"]
    assert [told for told in policy.told if told[2] or told[0] == "left"] == [
        ("used", (0, 0), True),
        ("left", (0, 1), False),
        ("used", (0, 0), True),
        ("left", (0, 2), False),
    ]
    assert (d.stats().loads, d.stats().reused, d.stats().preempted) == (4, 2, 0)


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_a_policy_that_evicts_hits_as_often_as_a_cache_of_that_size(slots: int) -> None:
    """Against a cache written here: one worker, one expert a pass, uniform routes."""
    d = Driver(workers=1, slots=slots, group=1, layers=1, experts=6, shadow=False, residency=LastUsed())
    d.open()
    cache: OrderedDict[int, None] = OrderedDict()
    rng, hits = Random(slots), 0
    for index in range(1, 200):
        expert = rng.randrange(6)
        hit = expert in cache
        hits += hit
        cache[expert] = None
        cache.move_to_end(expert)
        if len(cache) > slots:
            cache.popitem(last=False)
        assert (step(d, index, expert) == []) == hit
    assert d.stats().reused == hits
    assert d.stats().loads == 199 - hits


def test_a_resident_is_found_on_whichever_worker_has_it() -> None:
    d = Driver(workers=4, slots=1, group=2, layers=2, experts=4, residency=LastUsed())
    d.open()
    assert d.predict(0, 3, 1) == ["load 0.0 0/3", "load 1.0 0/1"]
    assert d.gate(0, 1, 3) == in_place("1.0 0/1", "0.0 0/3")
    d.loaded(0, 1)
    d.computed(0, 1)
    d.token(1)
    assert d.predict(1, 0, 2, at=P + 1) == ["load 2.0 1/0", "load 3.0 1/2"]
    assert d.predict(0, 3, 0, at=P + 1) == ["evict 1.0 0/1", "load 1.0 0/0"]  # 3 is there; 0 is worker 1's by its turn


def test_what_only_a_prediction_still_needs_gives_way_to_what_is_named() -> None:
    """One slot; two passes want expert 1, one of them for certain; when that is done another expert's turn comes."""
    d = Driver(workers=1, slots=1, group=1, layers=1, experts=4, residency=LastUsed())
    d.open(1)
    d.open(2)
    assert d.gate(0, 1, request=1) == ["load 0.0 0/1", *in_place("0.0 0/1")]
    d.loaded(0)
    assert d.predict(0, 1, at=P + 1, request=1) == []  # shares it
    assert d.gate(0, 2, request=2) == []  # must wait: the slot computes
    assert d.computed(0) == [
        f"resume 1@{P} layer 0",
        "evict 0.0 0/1",
        "load 0.0 0/2",
        *in_place("0.0 0/2", at=f"2@{P}"),
    ]
    assert d.computed(0) == [f"resume 2@{P} layer 0", "evict 0.0 0/2", "load 0.0 0/1"]
