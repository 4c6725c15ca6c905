"""Host memory, between disk and slots: which experts stay there, and what a load is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from scheduler import types as t
from scheduler.core.host_memory import HostTable
from scheduler.policies.residency.lru import LRU
from support.scheduling.core_driver import Driver, P
from support.worlds.plan import Plan, choosing_plan, eventful_plan, stepping_plan
from support.worlds.world import live

SHAPE = t.ModelShape((0, 1), 4, 1)


def driver(host_slots: int = 2) -> Driver:
    return Driver(1, 1, 1, layers=2, experts=4, top_k=1, shadow=False, host_slots=host_slots, host_residency=LRU(SHAPE))


def token(d: Driver, index: int, *experts: int) -> list[str]:
    """A decode pass that chooses one expert a layer. Its loads."""
    lines = d.token(index) if index else d.open()
    for layer, expert in enumerate(experts):
        lines += [*d.gate(layer, expert, at=P + index), *d.loaded(0), *d.computed(0)]
    return [line for line in lines if line.startswith("load")]


def test_an_expert_that_left_its_slot_comes_from_host_memory_until_another_takes_its_place_there() -> None:
    d = driver()
    assert token(d, 0, 0, 1) == ["load 0.0 0/0 through 0", "load 0.0 1/1 through 1"]
    assert token(d, 1, 0, 1) == ["load 0.0 0/0 from 0", "load 0.0 1/1 from 1"]
    assert token(d, 2, 3, 1) == ["load 0.0 0/3 through 0", "load 0.0 1/1 from 1"], "0/0 was used longest ago"
    assert token(d, 3, 0, 2) == ["load 0.0 0/0 through 0", "load 0.0 1/2 through 1"], "then 0/3, then 1/1"
    assert d.stats().loads_from_memory == 3


def test_what_was_given_up_failed_or_is_doubted_is_read_from_disk_again() -> None:
    d = driver()
    d.open()
    assert d.gate(0, 2)[-2:] == ["load 0.0 0/2 through 0", f"compute 0.0 0/2 1@{P} 0:1 last"]
    assert [one for one in d.load_failed(0) if "load" in one] == ["load 0.0 0/2 through 0"]
    d.loaded(0)
    call = d.calls[0, 0][-1]
    assert [one for one in d.do(t.ComputeFailed(call.call_id, "not finite")) if "load" in one] == ["load 0.0 0/2"], (
        "not through the slot in which the worker has the bytes that gave a wrong output"
    )
    d.loaded(0)
    d.computed(0)
    for index, load in ((1, "load 0.0 0/2 through 0"), (2, "load 0.0 0/2 from 0")):
        asked = [*d.token(index), *d.gate(0, 2, at=P + index), *d.loaded(0), *d.computed(0)]
        asked += [*d.gate(1, 0, at=P + index), *d.loaded(0), *d.computed(0)]
        assert [one for one in asked if " 0/2" in one and "load" in one] == [load]


def test_a_worker_that_gives_memory_back_keeps_its_first_slots_and_one_that_comes_back_has_nothing() -> None:
    d = driver()
    token(d, 0, 0, 1)
    assert d.do(t.HostMemoryShrunk(0, 1)) == []
    assert token(d, 1, 0, 1) == ["load 0.0 0/0 from 0", "load 0.0 1/1 through 0"]
    d.do(t.HostMemoryShrunk(0, 0))
    assert token(d, 2, 0, 1) == ["load 0.0 0/0", "load 0.0 1/1"]
    d.lose(0)
    d.do(t.WorkerJoined(0, 1, host_slots=2))
    assert token(d, 3, 0, 1) == ["load 0.0 0/0 through 0", "load 0.0 1/1 through 1"]


def test_a_load_is_expected_to_take_what_its_tiers_take_in_the_shares_that_were_seen() -> None:
    table, joined = HostTable({}, LRU(SHAPE)), t.WorkerJoined(0, 1, load_s=0.1, host_slots=4, host_load_s=0.02)
    table.on_worker_joined(joined)
    assert table.expected_load_s(joined) == 0.1
    for load_id in range(1, 5):
        table.assign(0, t.ExpertId(0, 0), "", load_id, predicted=False)
        table.on_loaded(0, t.ExpertId(0, 0), load_id)
    assert table.expected_load_s(joined) == pytest.approx(0.25 * 0.1 + 0.75 * 0.02)


@pytest.mark.parametrize("make", [choosing_plan, eventful_plan, stepping_plan])
def test_in_random_worlds_what_is_said_to_be_in_memory_is_there(make: Callable[[int], Plan]) -> None:
    """With losses, failures, audits and memory that shrinks; the books agree after each event, a replay is the same."""
    found: Counter[bool] = Counter()
    for seed in range(40):
        world = live(replace(make(seed), auditing=(0.0, 0.2)[seed % 2], host_slots=1 + seed % 7))
        found[any(worker.memory.loads_from_memory for worker in world.workers.values())] += 1
    assert found[True] > 10
