"""Workers that hold parts of the store, exact decisions: who loads what, and what ends when nobody holds an expert."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from scheduler import types as t
from scheduler.core.holders import Holders
from scheduler.core.homes import Homes
from scheduler.core.workers import AWAY
from scheduler.held import ranges_of
from scheduler.policies.placement import HostOnly
from scheduler.policies.residency.base import Everything
from scheduler.policies.residency.lru import LRU
from support.scheduling.core_driver import Driver, P, compute

LAYERS, EXPERTS = 3, 8


def part(*experts: int) -> tuple[t.HeldRange, ...]:
    """These experts of every layer."""
    return ranges_of(t.ExpertId(layer, expert) for layer in range(LAYERS) for expert in experts)


def in_parts(*parts: tuple[int, ...], slots: int = 1, **fields: object) -> Driver:
    """A worker for each part; no alignment, so that all commands are about experts."""
    made: dict[str, object] = {"workers": 0, "layers": LAYERS, "experts": EXPERTS, "shadow": False, **fields}
    d = Driver(**made)  # type: ignore[arg-type]
    for number, experts in enumerate(parts):
        assert d.do(t.WorkerJoined(number, slots, held=part(*experts))) == []
    return d


HALVES = (0, 1, 2, 3), (4, 5, 6, 7)
FOUR = (0, 1, 2, 3), (2, 3, 4, 5), (4, 5, 6, 7), (6, 7, 0, 1)
"""Every expert on two of four workers."""


# --- who loads --------------------------------------------------------------------------------------------------------


def test_predictions_go_to_holders_whosever_turn_it_is() -> None:
    d = in_parts(*HALVES, slots=2)
    d.open()
    assert d.predict(0, 1, 2) == ["load 0.0 0/1", "load 0.1 0/2"]
    assert d.predict(1, 5, 6) == ["load 1.0 1/5", "load 1.1 1/6"]


def test_of_two_holders_the_one_with_less_to_load_for_the_layer() -> None:
    d = in_parts(*FOUR, slots=2)
    d.open()
    assert d.predict(0, 2, 3) == ["load 0.0 0/2", "load 1.0 0/3"]
    assert d.predict(1, 2, 4) == ["load 0.1 1/2", "load 2.0 1/4"]


def test_what_a_gate_misses_goes_to_the_holder_with_the_smaller_backlog() -> None:
    d = in_parts(*FOUR, slots=2)
    d.open()
    assert d.gate(0, 2, 3) == ["load 0.0 0/2", *compute("0.0 0/2"), "load 1.0 0/3", *compute("1.0 0/3")]


def test_a_prefetch_that_failed_goes_to_another_holder() -> None:
    d = in_parts(*FOUR, slots=2)
    d.open()
    assert d.predict(0, 2, 3) == ["load 0.0 0/2", "load 1.0 0/3"]
    assert d.load_failed(0) == ["evict 0.0 0/2", "load 1.1 0/2"]


def test_prefill_assigns_each_expert_to_a_holder_and_evenly() -> None:
    d = in_parts(*FOUR, slots=2)
    d.prefill()
    queued = d.core.snapshot().workers
    for number, worker in queued.items():
        mine = [expert for expert in (*worker.loading, *worker.queued) if expert.layer == 0]
        assert len(mine) == 2
        assert {expert.expert for expert in mine} <= set(FOUR[number])


def test_a_worker_that_holds_all_serves_the_rest() -> None:
    d = in_parts((0, 1))
    assert d.do(t.WorkerJoined(7, 1)) == []
    d.open()
    assert d.gate(0, 0, 5) == ["load 0.0 0/0", *compute("0.0 0/0"), "load 7.0 0/5", *compute("7.0 0/5")]


def test_where_all_hold_all_a_list_of_all_changes_nothing() -> None:
    """The same commands as without any list."""
    plain, listed = Driver(workers=4, layers=LAYERS), in_parts(shadow=True)
    everything = part(*range(EXPERTS))
    for number in range(4):
        listed.do(t.WorkerJoined(number, 1, held=everything if number < 0 else None))
    for d in (plain, listed):
        d.open()
    assert plain.predict(0, 3, 5) == listed.predict(0, 3, 5) == ["load 0.0 0/3", "load 1.0 0/5"]
    assert plain.predict(1, 1, 2) == listed.predict(1, 1, 2) == ["load 2.0 1/1", "load 3.0 1/2"]


def test_an_audit_goes_to_a_holder() -> None:
    d = in_parts(*HALVES)
    assert d.do(t.AuditRequested(1, t.ExpertId(0, 5), 1, avoid=())) == ["load 1.0 0/5", "compute 1.0 0/5 -1@0 0:1 last"]
    assert d.do(t.AuditRequested(2, t.ExpertId(0, 5), 1, avoid=(1,))) == ["drop audit 2"]


def test_a_host_place_computes_what_it_holds() -> None:
    d = in_parts(tuple(range(EXPERTS)), placement=HostOnly())
    d.do(t.WorkerJoined(1, 0, held=part(3)))
    d.hosts.add(1)
    d.open()
    out = d.gate(0, 3, 4)
    assert out == ["load 0.0 0/4", *compute("0.0 0/4"), f"compute 1.0 0/3 1@{P} 0:1"] or out == [
        f"compute 1.0 0/3 1@{P} 0:1",
        "load 0.0 0/4",
        *compute("0.0 0/4"),
    ]


# --- caches and homes -------------------------------------------------------------------------------------------------


def test_a_cache_loads_an_expert_at_its_home_unless_that_is_much_busier() -> None:
    d = in_parts(*[tuple(range(EXPERTS - 1))] * 2, slots=8, residency=LRU(t.ModelShape((0, 1, 2), EXPERTS, 2)))
    holders = Holders()
    for number in range(2):
        holders.on_worker_joined(number, 8, part(*range(EXPERTS - 1)))
    homes = [holders.home(t.ExpertId(1, expert)) for expert in range(EXPERTS - 1)]
    assert set(homes) == {0, 1}
    mine = [expert for expert, home in enumerate(homes) if home == homes[0]]
    d.open()
    d.gate(0, 0)
    ((worker, _),) = d.in_slots
    d.loaded(worker)
    d.computed(worker)  # the first that stays: there is a cache
    d.gate(1, *mine)
    loaded = [load.worker for load in d.raw if isinstance(load, t.Load)]
    assert len(mine) > AWAY
    assert Counter(loaded)[homes[0]] - Counter(loaded)[1 - homes[0]] in (AWAY - 1, AWAY)


def test_homes_follow_slots_and_stay_when_others_leave() -> None:
    experts = [t.ExpertId(layer, expert) for layer in range(40) for expert in range(100)]
    holders = Holders()
    for number, slots in enumerate((10, 10, 20)):
        holders.on_worker_joined(number, slots, ranges_of(experts))
    before = {expert: holders.home(expert) for expert in experts}
    count = Counter(before.values())
    assert 0.45 < count[2] / len(experts) < 0.55
    assert 0.22 < count[0] / len(experts) < 0.28
    holders.on_worker_lost(0, "cable")
    after = {expert: holders.home(expert) for expert in experts}
    assert {expert for expert in experts if before[expert] != after[expert]} == {e for e in experts if before[e] == 0}


@pytest.mark.parametrize(("slots", "parts"), [(3, HALVES), (2, FOUR), (1, ((0,), (1, 2), (0, 1), (2, 3)))])
def test_permanent_homes_are_where_experts_are_held(slots: int, parts: tuple[tuple[int, ...], ...]) -> None:
    """As many find one as by trying every choice."""
    shape, holders = t.ModelShape((0,), EXPERTS, 2), Holders()
    homes = Homes(shape, holders)
    for number, experts in enumerate(parts):
        holders.on_worker_joined(number, slots, tuple(t.HeldRange(0, e, e) for e in experts))
        homes.on_worker_joined(number, slots)
    homes.settle()
    found = {expert: homes.worker_of(t.ExpertId(0, expert)) for expert in range(EXPERTS)}
    settled = {expert: worker for expert, worker in found.items() if worker is not None}
    assert all(expert in parts[worker] for expert, worker in settled.items())
    assert max(Counter(settled.values()).values()) <= slots
    choices = [[n for n, experts in enumerate(parts) if expert in experts] or [-1] for expert in range(EXPERTS)]
    best = max(
        sum(min(slots, count) for worker, count in Counter(choice).items() if worker >= 0)
        for choice in itertools.product(*choices)
    )
    assert len(settled) == best


def test_where_everything_stays_it_stays_with_a_holder() -> None:
    d = in_parts(*FOUR, slots=6, residency=Everything())
    d.prefill()
    for worker, experts in enumerate(FOUR):
        snapshot = d.core.snapshot().workers[worker]
        assert {expert.expert for expert in (*snapshot.loading, *snapshot.queued)} <= set(experts)


def test_a_home_that_holds_its_expert_no_more_is_given_up_unless_the_expert_is_in_its_slot() -> None:
    holders = Holders()
    homes = Homes(t.ModelShape((0,), 4, 2), holders)
    for number, slots in enumerate((4, 3)):
        holders.on_worker_joined(number, slots, (t.HeldRange(0, 0, 3),))
        homes.on_worker_joined(number, slots)
    homes.settle()
    first, second, *_ = mine = [t.ExpertId(0, e) for e in range(4) if homes.worker_of(t.ExpertId(0, e)) == 0]
    holders.on_changed(0, ())
    homes.on_holdings_changed(0, {first})
    homes.settle()
    assert (homes.worker_of(first), homes.worker_of(second)) == (0, 1)
    assert homes.room(0) == 3, f"{mine} lived there"


def test_a_slot_that_was_the_home_of_what_its_worker_holds_no_more_is_free() -> None:
    """For an audit: it takes no slot that is some expert's home."""
    d = in_parts((0, 1), (0, 1), experts=2, slots=3, residency=Everything())
    d.open(decode=False)
    asked = t.AuditRequested(1, t.ExpertId(0, 0), 1, avoid=(0,))
    assert d.do(asked) == ["drop audit 1"]
    d.do(t.HoldingsChanged(1, part(0)))
    assert d.do(asked)[0] == "load 1.0 0/0"


# --- workers that come and go -----------------------------------------------------------------------------------------


def test_a_lost_workers_experts_go_to_the_other_holders_at_once() -> None:
    d = in_parts(*FOUR)
    d.open()
    d.gate(0, 2, 5)
    assert d.where == {0: (0, 2), 1: (0, 5)}
    assert d.lose(1) == ["load 2.0 0/5", *compute("2.0 0/5")]


def test_nobody_holds_an_expert_and_only_the_request_that_needs_it_ends() -> None:
    d = in_parts(*HALVES)
    d.together(1, 2)
    d.lose(1, "power cut")
    assert d.gate(0, 1, request=1) == []
    assert d.gate(0, 6, request=2) == ["load 0.0 0/1", *compute("0.0 0/1")]
    assert d.core.shortfall == "workers with parts of the model are missing"
    assert d.core.snapshot().unheld == (t.ExpertId(0, 6),)
    d.loaded(0)
    assert d.computed(0) == [f"resume 1@{P} layer 0"]
    assert d.do(t.WorkerWaitExpired("worker 1 did not come back")) == [
        "fail 2: expert 6 of layer 0 was held by worker 1 (power cut), lost since, and by no worker that is connected; "
        "worker 1 did not come back"
    ]
    assert d.core.shortfall is None
    assert d.gate(1, 2, request=1) == ["load 0.0 1/2", *compute("0.0 1/2")]


def test_what_nobody_ever_held_is_said_so() -> None:
    d = in_parts((0, 1))
    d.open()
    d.gate(0, 5)
    assert d.do(t.WorkerWaitExpired("too long")) == [
        "fail 1: no worker holds expert 5 of layer 0, and none that is lost did; too long"
    ]


def test_the_holder_is_back_in_time() -> None:
    d = in_parts(*HALVES)
    d.open()
    d.gate(0, 1, 6)
    assert d.lose(1) == []
    assert d.do(t.WorkerJoined(1, 1, held=part(*HALVES[1]))) == ["load 1.0 0/6", *compute("1.0 0/6")]
    assert d.do(t.WorkerWaitExpired("late")) == []


def test_a_prefetch_that_nobody_holds_fails_nothing() -> None:
    d = in_parts((0, 1, 2))
    d.open()
    assert d.predict(0, 0, 5) == ["load 0.0 0/0"]
    assert d.core.shortfall is None
    assert d.do(t.WorkerWaitExpired("late")) == []
    assert d.gate(0, 0) == compute("0.0 0/0")
    assert d.core.snapshot().unheld == ()


def test_a_new_worker_and_one_that_holds_more_are_used_at_once() -> None:
    d = in_parts((0, 1))
    d.open()
    d.gate(0, 5, 7)
    assert d.do(t.HoldingsChanged(0, part(0, 1, 5))) == ["load 0.0 0/5", *compute("0.0 0/5")]
    assert d.do(t.WorkerJoined(3, 1, held=part(7))) == ["load 3.0 0/7", *compute("3.0 0/7")]


def test_what_waits_at_a_worker_that_holds_it_no_more_goes_to_another() -> None:
    d = in_parts((0, 1, 2), (1, 2))
    d.open()
    d.gate(0, 0, 1)
    d.predict(1, 0)
    d.predict(2, 0, 1)
    before = d.core.snapshot().workers[0].queued
    assert (2, 1) in [tuple(one) for one in (*before, *d.core.snapshot().workers[1].queued)]
    d.do(t.HoldingsChanged(1, part(2)))
    assert all(expert.expert == 2 for expert in d.core.snapshot().workers[1].queued)


def test_all_workers_are_lost_and_one_part_comes_back() -> None:
    """What the part has goes on; the rest waits for the other."""
    d = in_parts(*HALVES)
    d.open()
    d.gate(0, 1, 6)
    d.lose(0)
    d.lose(1)
    assert d.do(t.WorkerJoined(0, 1, held=part(*HALVES[0]))) == ["load 0.0 0/1", *compute("0.0 0/1")]
    d.loaded(0)
    assert d.computed(0) == []
    assert d.core.snapshot().unheld == (t.ExpertId(0, 6),)
