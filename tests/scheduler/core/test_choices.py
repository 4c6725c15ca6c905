"""The core's choices, exact decisions: who predicts, who stays in a slot, when prefill loads."""

from __future__ import annotations

from collections import Counter, OrderedDict
from random import Random
from types import ModuleType
from typing import Any

import pytest

from scheduler import types as t
from scheduler.core.groups import RoundRobin
from scheduler.core.homes import Homes
from scheduler.core.machine import MAX_FAILURES
from scheduler.errors import ConfigError
from scheduler.policies.predictors.base import Forecast, RandomPredictor, Silent
from scheduler.policies.residency.base import Cacheless, Everything
from scheduler.types import ExpertId

P = 60


def prefilling(d: Any, prompt: int = 16, request: int = 1) -> list[str]:
    d.open(request, prompt, decode=False)
    return list(d.do(t.PassStarted(request, 0, prompt, prefill=True)))


def lines(what: str, *places: str, at: str = f"1@{P}", rows: str = "0:1") -> list[str]:
    """Computations after which the expert stays where it is, loads, or evictions."""
    return [f"{what} {place} {at} {rows}" if what == "compute" else f"{what} {place}" for place in places]


# --- everything stays -------------------------------------------------------------------------------------------


def full(desk: ModuleType, **fields: Any) -> Any:
    return desk.Driver(**({"residency": Everything(), "shadow": False} | fields))


def test_what_stays_is_loaded_once_and_computed_where_it_is(desk: ModuleType) -> None:
    d = full(desk, workers=2, slots=2, layers=2, experts=2)
    assert prefilling(d) == ["load 0.0 0/0", "load 0.1 1/0", "load 1.0 0/1", "load 1.1 1/1"]
    for worker, slot in d.held:
        d.loaded(worker, slot=slot)
    for layer in range(2):
        out = d.gate(layer, at=0, rows={0: 16, 1: 16})
        assert out == lines("compute", f"0.{layer} {layer}/0", f"1.{layer} {layer}/1", at="1@0", rows="0:16")
        assert d.computed(0, 1, slot=layer) == [f"resume 1@0 layer {layer}"]
    assert (d.stats().loads, d.stats().hits, len(d.held)) == (4, 0, 4)
    d.token(0, prompt=16)
    for layer in range(2):
        assert d.gate(layer, 1, at=16) == lines("compute", f"1.{layer} {layer}/1", at="1@16")
        assert d.computed(1, slot=layer) == [f"resume 1@16 layer {layer}"]
    assert (d.stats().loads, d.stats().hits, d.stats().decode_hits) == (4, 2, 2)
    assert (d.stats().reloads, d.stats().stall_s, len(d.held)) == (0, 0.0, 4)
    assert d.do(t.RequestClosed(1)) == []
    assert prefilling(d, request=2) == []  # the next request finds all of them
    assert d.gate(0, at=0, request=2, rows={0: 1}) == lines("compute", "0.0 0/0", at="2@0")


def test_an_expert_that_is_not_there_is_loaded_by_whoever_names_it_first(desk: ModuleType) -> None:
    d = full(desk, workers=2, slots=2, layers=2, experts=2)
    d.open()
    assert d.gate(1, 0) == ["load 0.0 1/0", *lines("compute", "0.0 1/0")]
    d.loaded(0)
    assert d.computed(0) == [f"resume 1@{P} layer 1"]
    d.token(1)
    assert d.gate(1, 0, 1, at=P + 1) == [
        *lines("compute", "0.0 1/0", at=f"1@{P + 1}"), "load 1.0 1/1", *lines("compute", "1.0 1/1", at=f"1@{P + 1}"),
    ]  # fmt: skip
    assert d.computed(0, 1) == [f"resume 1@{P + 1} layer 1"]
    assert (d.stats().loads, d.stats().reloads, d.stats().hits) == (2, 2, 1)


def test_a_wrong_prediction_stays_and_its_load_goes_on(desk: ModuleType) -> None:
    d = full(desk, workers=4, slots=2, layers=1, experts=8, shadow=True)
    d.open()
    assert d.predict(0, 5, 6) == ["load 1.0 0/5", "load 2.0 0/6"]  # their homes, whosever turn it is
    assert d.gate(0, 5, 7) == [*lines("compute", "1.0 0/5"), "load 3.0 0/7", *lines("compute", "3.0 0/7")]
    assert d.loaded(1, 2, 3) == []
    assert d.computed(1, 3) == [f"resume 1@{P} layer 0"]
    assert (d.stats().unused, d.stats().overall.recall) == (1, 0.5)
    assert d.predict(0, 6, 5, at=P + 1) == []
    assert d.gate(0, 5, 6, at=P + 1) == lines("compute", "1.0 0/5", "2.0 0/6", at=f"1@{P + 1}")
    assert d.computed(1, 2) == [f"resume 1@{P + 1} layer 0"]
    assert d.predict(0, 1, at=P + 2) == ["load 1.1 0/1"]
    assert d.gate(0, at=P + 2) == [f"resume 1@{P + 2} layer 0"]
    assert (d.stats().loads, d.stats().hits, d.stats().unused, d.stats().bytes_loaded) == (4, 2, 2, 30)


def test_two_requests_share_an_expert_in_its_one_slot(desk: ModuleType) -> None:
    d = full(desk, workers=1, slots=2, layers=1, experts=2)
    d.open(1)
    d.open(2)
    assert d.gate(0, 0, request=1) == ["load 0.0 0/0", *lines("compute", "0.0 0/0")]
    d.now = 3.0
    assert d.gate(0, 0, request=2) == lines("compute", "0.0 0/0", at=f"2@{P}")
    d.now = 5.0
    assert d.loaded(0) == []
    assert (d.stats(1).stall_s, d.stats(2).stall_s) == (5.0, 2.0)
    assert d.do(t.RequestClosed(1)) == []
    first, second = d.calls[0, 0]
    assert d.do(t.ComputeEnded(first.call_id)) == []
    assert d.do(t.ComputeEnded(second.call_id)) == [f"resume 2@{P} layer 0"]
    assert (d.stats(1).loads, d.stats(2).loads, d.stats(2).hits) == (1, 0, 1)


def test_a_shared_load_that_fails_is_tried_again_once_for_all(desk: ModuleType) -> None:
    d = full(desk, workers=2, slots=1, layers=1, experts=2)
    d.open(1)
    d.open(2)
    d.gate(0, 0, request=1)
    d.gate(0, 0, request=2)
    both = [*lines("compute", "0.0 0/0"), *lines("compute", "0.0 0/0", at=f"2@{P}")]
    assert d.load_failed(0) == ["evict 0.0 0/0", "load 0.0 0/0", *both]  # at home, though worker 1 is free
    d.loaded(0)
    failed = d.calls[0, 0][0].call_id
    assert d.do(t.ComputeFailed(failed, "nan")) == ["evict 0.0 0/0", "load 0.0 0/0", *both]
    assert d.stats(2).loads == 0
    assert MAX_FAILURES == 3
    often = "expert 0 of layer 0 failed 3 times: disk"
    # It has failed once less for request 2, whose computation never did.
    assert d.load_failed(0) == [
        f"fail 1: {often}", "evict 0.0 0/0", "load 0.0 0/0", *lines("compute", "0.0 0/0", at=f"2@{P}"),
    ]  # fmt: skip
    assert d.load_failed(0) == ["evict 0.0 0/0", f"fail 2: {often}"]
    assert d.held == {}


def test_a_load_that_failed_for_nobody_is_forgotten(desk: ModuleType) -> None:
    d = full(desk, workers=1, slots=2, layers=1, experts=2, shadow=True)
    d.open()
    assert d.predict(0, 1) == ["load 0.0 0/1"]
    assert d.gate(0) == [f"resume 1@{P} layer 0"]
    assert d.load_failed(0) == ["evict 0.0 0/1"]
    assert d.predict(0, 1, at=P + 1) == ["load 0.0 0/1"]


def test_too_few_slots_fail_the_request_and_say_how_many_are_needed(desk: ModuleType) -> None:
    d = full(desk, workers=3, slots=2, layers=2, experts=4, by_layer=(4, 3))
    (failed,) = d.open(decode=False)
    assert failed.startswith("fail 1: residency all keeps every expert")
    assert "7 slots are needed, 6 are there" in failed
    d.do(t.WorkerJoined(3, 1))
    assert d.open(2, decode=False) == []
    shape = d.core.shape
    Everything().check(shape, 7)
    with pytest.raises(ConfigError, match="7 slots are needed, 6 are there"):
        Everything().check(shape, 6)
    Cacheless().check(shape, 0)


def test_experts_of_a_lost_worker_find_another_home_and_nobody_else_moves(desk: ModuleType) -> None:
    d = full(desk, workers=3, slots=3, layers=2, experts=3)
    prefilling(d)
    for worker, slot in list(d.held):
        d.loaded(worker, slot=slot)
    assert d.gate(0, at=0, rows={1: 4}) == lines("compute", "1.0 0/1", at="1@0", rows="0:4")
    # 0/1 was being computed and 1/1 is wanted by the plan: 0/1 takes worker 0's third slot, 1/1 worker 2's.
    assert d.lose(1) == ["load 0.2 0/1", *lines("compute", "0.2 0/1", at="1@0", rows="0:4"), "load 2.2 1/1"]
    d.loaded(0, slot=2)
    assert d.computed(0, slot=2) == ["resume 1@0 layer 0"]
    assert (d.stats().loads, d.stats().hits) == (8, 0)
    assert d.do(t.WorkerJoined(1, 3)) == []  # everybody has a home: it stays empty
    assert d.gate(1, at=0, rows={0: 1, 1: 1}) == lines("compute", "0.1 1/0", "2.2 1/1", at="1@0")


def test_a_loss_that_leaves_too_few_slots_fails_what_is_open_until_workers_come(desk: ModuleType) -> None:
    d = full(desk, workers=2, slots=1, layers=1, experts=2)
    d.open()
    d.gate(0, 0, 1)
    (failed,) = d.lose(0)
    assert failed.startswith("fail 1: ")
    assert "2 slots are needed, 1 are there" in failed
    assert d.core.snapshot().visits == d.core.snapshot().calls == ()
    d.do(t.WorkerJoined(7, 1))
    d.open(2)
    assert d.gate(0, 0, 1, request=2) == [
        *lines("compute", "1.0 0/1", at=f"2@{P}"), "load 7.0 0/0", *lines("compute", "7.0 0/0", at=f"2@{P}"),
    ]  # fmt: skip


@pytest.mark.parametrize(("workers", "layers", "experts"), [(8, 4, 8), (3, 5, 4), (5, 2, 8), (1, 3, 2)])
def test_homes_are_where_prefill_would_share_them_out(workers: int, layers: int, experts: int) -> None:
    homes = Homes(t.ModelShape(tuple(range(layers)), experts, 2))
    for worker in range(workers):
        homes.joined(worker, -(-layers * experts // workers))
    homes.settle()
    for layer in range(layers):
        share = RoundRobin(2).share(range(workers), layer, experts)
        assert [homes.of(ExpertId(layer, e)) for e in range(experts)] == share


def test_homes_fill_workers_of_any_size() -> None:
    homes = Homes(t.ModelShape((1, 3), 4, 2, by_layer=(4, 3)))
    for worker, slots in ((2, 1), (5, 4), (7, 2)):
        homes.joined(worker, slots)
    homes.settle()
    everybody = [ExpertId(1, e) for e in range(4)] + [ExpertId(3, e) for e in range(3)]
    assert [homes.of(expert) for expert in everybody] == [2, 5, 7, 5, 7, 5, 5]


# --- a policy that evicts ---------------------------------------------------------------------------------------


def step(d: Any, index: int, *experts: int) -> list[str]:
    """One decode pass through a model of one layer."""
    d.token(index)
    out = list(d.gate(0, *experts, at=P + index))
    for place in [place for place, calls in d.calls.items() if calls]:
        call = d.calls[place].pop()
        d.do(t.LoadEnded(d.held[place].load_id, 10))
        d.do(t.ComputeEnded(call.call_id))
    assert d.raw == [t.Resume(t.Visit(1, P + index, 0))]
    return [x for x in out if not x.startswith("compute")]


def test_a_policy_that_evicts_is_told_of_uses_and_asked_for_victims(desk: ModuleType, world: ModuleType) -> None:
    policy = world.LastUsed()
    d = desk.Driver(workers=1, slots=2, group=1, layers=1, experts=4, shadow=False, residency=policy)
    d.open()
    assert step(d, 1, 0) == ["load 0.0 0/0"]
    assert step(d, 2, 1) == ["load 0.1 0/1"]
    assert step(d, 3, 0) == []
    assert step(d, 4, 2) == ["evict 0.1 0/1", "load 0.1 0/2"]
    assert step(d, 5, 0) == []
    assert step(d, 6, 3) == ["evict 0.1 0/2", "load 0.1 0/3"]
    assert [told for told in policy.told if told[2] or told[0] == "left"] == [
        ("used", (0, 0), True), ("left", (0, 1), False), ("used", (0, 0), True), ("left", (0, 2), False),
    ]  # fmt: skip
    assert (d.stats().loads, d.stats().hits, d.stats().preempted) == (4, 2, 0)


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_a_policy_that_evicts_hits_as_often_as_a_cache_of_that_size(
    desk: ModuleType, world: ModuleType, slots: int
) -> None:
    """Against a cache written here: one worker, one expert a pass, uniform routes."""
    d = desk.Driver(workers=1, slots=slots, group=1, layers=1, experts=6, shadow=False, residency=world.LastUsed())
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
    assert d.stats().hits == hits
    assert d.stats().loads == 199 - hits


def test_a_resident_is_found_on_whichever_worker_has_it(desk: ModuleType, world: ModuleType) -> None:
    d = desk.Driver(workers=4, slots=1, group=2, layers=2, experts=4, residency=world.LastUsed())
    d.open()
    assert d.predict(0, 3, 1) == ["load 0.0 0/3", "load 1.0 0/1"]
    assert d.gate(0, 1, 3) == lines("compute", "1.0 0/1", "0.0 0/3")
    d.loaded(0, 1)
    d.computed(0, 1)
    d.token(1)
    assert d.predict(1, 0, 2, at=P + 1) == ["load 2.0 1/0", "load 3.0 1/2"]
    assert d.predict(0, 3, 0, at=P + 1) == ["evict 1.0 0/1", "load 1.0 0/0"]  # 3 is there; 0 is worker 1's by its turn


def test_what_only_a_prediction_still_needs_gives_way_to_what_is_named(desk: ModuleType, world: ModuleType) -> None:
    """One slot; two passes want expert 1, one of them for certain; when that is done another expert's turn comes."""
    d = desk.Driver(workers=1, slots=1, group=1, layers=1, experts=4, residency=world.LastUsed())
    d.open(1)
    d.open(2)
    assert d.gate(0, 1, request=1) == ["load 0.0 0/1", *lines("compute", "0.0 0/1")]
    d.loaded(0)
    assert d.predict(0, 1, at=P + 1, request=1) == []  # shares it
    assert d.gate(0, 2, request=2) == []  # must wait: the slot computes
    assert d.computed(0) == [
        f"resume 1@{P} layer 0", "evict 0.0 0/1", "load 0.0 0/2", *lines("compute", "0.0 0/2", at=f"2@{P}"),
    ]  # fmt: skip
    assert d.computed(0) == [f"resume 2@{P} layer 0", "evict 0.0 0/2", "load 0.0 0/1"]


# --- the core predicts ------------------------------------------------------------------------------------------


class Says(Silent):
    """The same experts in every layer of a decode pass, when it begins."""

    def __init__(self, *experts: int) -> None:
        super().__init__(t.ModelShape((0, 1, 2), 8, 2, by_layer=(8, 4, 8)))
        self.experts = experts
        self.asked: list[tuple[t.Visit, int, bool]] = []

    def begun(self, visit: t.Visit, rows: int, prefill: bool) -> list[Forecast]:
        self.asked.append((visit, rows, prefill))
        return [] if prefill else [Forecast(visit._replace(layer=layer), self.experts) for layer in self.shape.layers]


def test_a_predictor_speaks_when_a_decode_pass_begins_as_a_shadow_would(desk: ModuleType) -> None:
    says = Says(3, 1)
    d = desk.Driver(workers=4, layers=3, predictor=says, shadow=False, by_layer=(8, 4, 8))
    prefilling(d, prompt=P)
    assert says.asked.pop() == (t.Visit(1, 0, 0), P, True)
    d = desk.Driver(workers=4, layers=3, predictor=says, shadow=False, by_layer=(8, 4, 8))
    assert d.open() == ["load 0.0 0/3", "load 1.0 0/1", "load 2.0 1/3", "load 3.0 1/1"]
    assert says.asked == [(t.Visit(1, P, 0), 1, False)]
    other = desk.Driver(workers=4, layers=3, shadow=False, by_layer=(8, 4, 8))
    other.open()
    told = [other.predict(layer, 3, 1) for layer in range(3)]
    assert told == [["load 0.0 0/3", "load 1.0 0/1"], ["load 2.0 1/3", "load 3.0 1/1"], []]
    for x in (d, other):
        assert x.gate(0, 3, 5) == [
            "evict 1.0 0/1", "compute 0.0 0/3 1@60 0:1 last", "load 1.0 0/5", "compute 1.0 0/5 1@60 0:1 last",
        ]  # fmt: skip
    assert (d.stats().overall.recall, d.stats().in_time, d.stats().reloads) == (0.5, 1, 1)
    assert other.stats().overall.recall is None  # no shadow follows, nobody predicts: nothing to compare with


def test_chance_names_each_expert_equally_often_and_always_the_same_for_a_visit() -> None:
    def chance(experts: int, top_k: int, seed: int, layers: int = 1, passes: int = 1) -> list[tuple[int, ...]]:
        predictor = RandomPredictor(t.ModelShape(tuple(range(layers)), experts, top_k), seed)
        assert not predictor.begun(t.Visit(1, 0, 0), 9, True)
        said = [f for at in range(passes) for f in predictor.begun(t.Visit(1, at, 0), 1, False)]
        assert [f.visit for f in said] == [t.Visit(1, at, layer) for at in range(passes) for layer in range(layers)]
        return [f.experts for f in said]

    said = chance(8, 2, 1, 20, 200)
    assert said == chance(8, 2, 1, 20, 200)
    assert all(len(set(experts)) == 2 for experts in said)
    count = Counter(e for experts in said for e in experts)
    assert set(count) == set(range(8))
    assert all(abs(n - 1000) < 150 for n in count.values())  # five standard deviations
    assert chance(256, 8, 2) != chance(256, 8, 1)
    assert sorted(chance(3, 8, 0)[0]) == [0, 1, 2]


def test_the_recall_of_chance_is_k_over_e(desk: ModuleType) -> None:
    chance = RandomPredictor(t.ModelShape(tuple(range(32)), 8, 2))
    d = desk.Driver(workers=8, layers=32, experts=8, predictor=chance, shadow=False)
    d.open()
    rng = Random(5)
    for index in range(40):
        for layer in range(32):
            d.gate(layer, *rng.sample(range(8), 2), at=P + index)
            for worker in [place[0] for place, calls in d.calls.items() if calls]:
                d.computed(worker)
        d.token(index + 1)
    recall = d.stats().overall.recall
    assert d.stats().overall.activated == 40 * 32 * 2
    assert recall is not None
    assert abs(recall - 2 / 8) < 0.04  # 2560 draws: five standard deviations


# --- prefill in turn --------------------------------------------------------------------------------------------


def in_turn(desk: ModuleType, **fields: Any) -> Any:
    return desk.Driver(**({"prefill": "in-turn", "shadow": False} | fields))


def test_in_turn_a_layer_loads_after_its_gate_and_is_sent_when_all_have_ended(desk: ModuleType) -> None:
    d = in_turn(desk, workers=4, layers=2, experts=4, mini_batch=4)
    assert prefilling(d) == []
    assert d.gate(0, at=0, rows={0: 16, 1: 6, 3: 4}) == ["load 0.0 0/0", "load 1.0 0/1", "load 3.0 0/3"]
    d.now = 25.0
    assert d.loaded(0, 3) == []
    d.now = 26.0
    assert d.loaded(1) == [
        *lines("compute", "0.0 0/0", at="1@0", rows="0:4"), *lines("compute", "0.0 0/0", at="1@0", rows="4:8"),
        *lines("compute", "0.0 0/0", at="1@0", rows="8:12"), "compute 0.0 0/0 1@0 12:16 last",
        *lines("compute", "1.0 0/1", at="1@0", rows="0:4"), "compute 1.0 0/1 1@0 4:6 last",
        "compute 3.0 0/3 1@0 0:4 last",
    ]  # fmt: skip
    assert d.computed(0, 0, 0, 0, 1, 1) == []
    assert d.computed(3) == ["resume 1@0 layer 0"]
    assert d.gate(1, at=0, rows={2: 1}) == ["load 2.0 1/2"]
    assert d.loaded(2) == ["compute 2.0 1/2 1@0 0:1 last"]
    assert d.computed(2) == ["resume 1@0 layer 1"]
    stats = d.stats()
    assert (stats.loads, stats.reloads, stats.unused, stats.prefill_stall_s) == (4, 0, 0, 26.0)
    d.token(0, prompt=16)
    assert d.gate(0, 3, at=16)[0].startswith("load")  # decoding is as ever: rows travel while the expert loads
    assert [desk.line(c) for c in d.raw][1].startswith("compute")
    assert d.stats().reloads == 1


def test_in_turn_experts_that_find_no_slot_go_after_those_that_do(desk: ModuleType) -> None:
    d = in_turn(desk, workers=2, layers=1, experts=4)
    prefilling(d)
    assert d.gate(0, at=0, rows=dict.fromkeys(range(4), 2)) == ["load 0.0 0/0", "load 1.0 0/1"]
    assert d.loaded(0) == []
    assert d.loaded(1) == ["compute 0.0 0/0 1@0 0:2 last", "compute 1.0 0/1 1@0 0:2 last"]
    assert d.computed(1) == ["load 1.0 0/3"]
    assert d.computed(0) == ["load 0.0 0/2"]
    assert d.loaded(1) == []
    assert d.loaded(0) == ["compute 0.0 0/2 1@0 0:2 last", "compute 1.0 0/3 1@0 0:2 last"]
    assert d.computed(0, 1) == ["resume 1@0 layer 0"]


def test_in_turn_a_loss_does_not_hold_up_what_has_its_slot(desk: ModuleType) -> None:
    """The lost worker's expert must wait for the other's slot, which must be left first."""
    d = in_turn(desk, workers=2, layers=1, experts=2)
    prefilling(d)
    d.gate(0, at=0, rows={0: 2, 1: 2})
    assert d.loaded(0) == []
    assert d.lose(1) == ["compute 0.0 0/0 1@0 0:2 last"]
    assert d.computed(0) == ["load 0.0 0/1"]
    assert d.loaded(0) == ["compute 0.0 0/1 1@0 0:2 last"]
    assert d.computed(0) == ["resume 1@0 layer 0"]


def test_in_turn_what_is_there_already_waits_for_the_rest_or_for_nothing(desk: ModuleType) -> None:
    d = in_turn(desk, workers=2, slots=1, layers=1, experts=2, residency=Everything())
    prefilling(d)
    assert d.gate(0, at=0, rows={0: 2}) == ["load 0.0 0/0"]
    assert d.loaded(0) == lines("compute", "0.0 0/0", at="1@0", rows="0:2")
    d.computed(0)
    d.do(t.RequestClosed(1))
    prefilling(d, request=2)
    assert d.gate(0, at=0, request=2, rows={0: 2, 1: 2}) == ["load 1.0 0/1"]
    assert d.loaded(1) == lines("compute", "0.0 0/0", "1.0 0/1", at="2@0", rows="0:2")
    d.computed(0, 1)
    prefilling(d, request=3)
    assert d.gate(0, at=0, request=3, rows={1: 2}) == lines("compute", "1.0 0/1", at="3@0", rows="0:2")
    assert d.computed(1) == ["resume 3@0 layer 0"]
    assert (d.stats(2).loads, d.stats(2).hits, d.stats(3).hits) == (1, 1, 1)


# --- a large cluster ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("everything", [False, True])
def test_a_thousand_workers_serve_61_layers_of_256_experts(desk: ModuleType, everything: bool) -> None:
    """DeepSeek-V3's shape: one prefill and decode passes with a shadow that is right nine times in ten."""
    layers, experts, top_k, prompt = 61, 256, 8, 4
    fields = {"residency": Everything(), "slots": 16} if everything else {}
    d = desk.Driver(workers=1000, group=top_k, layers=layers, experts=experts, **fields)
    rng, ended = Random(1), set()

    def arrive() -> None:
        while begun := {load.load_id for load in d.held.values()} - ended:
            ended.update(begun)
            for load_id in sorted(begun):
                d.do(t.LoadEnded(load_id, 1))

    def through(at: int, layer: int, named: list[int], guess: list[int] | None) -> None:
        if guess is not None:
            d.predict(layer, *guess, at=at)
        d.gate(layer, *named, at=at)
        for place in [place for place, calls in d.calls.items() if calls]:
            d.do(t.LoadEnded(d.held[place].load_id, 1))
            d.computed(place[0], slot=place[1])
        assert d.raw[0] == t.Resume(t.Visit(1, at, layer))
        d.calls.clear()

    prefilling(d, prompt)
    for layer in range(layers):
        arrive()
        through(0, layer, rng.sample(range(experts), 30), None)
    for index in range(3):
        d.token(index, prompt=prompt)
        for layer in range(layers):
            named = rng.sample(range(experts), top_k)
            guess = [e if rng.random() < 0.9 else (e + 1) % experts for e in named]
            through(prompt + index, layer, named, list(dict.fromkeys(guess)))
    stats = d.stats()
    assert stats.overall.activated == 3 * layers * top_k
    assert 0.85 < (stats.overall.recall or 0) < 0.95
    if everything:
        assert (stats.loads, stats.decode_loads, stats.decode_hits) == (layers * experts, 0, 3 * layers * top_k)
        assert len(d.held) == layers * experts
    else:
        assert (stats.hits, d.held) == (0, {})
        assert stats.decode_loads >= 3 * layers * top_k
