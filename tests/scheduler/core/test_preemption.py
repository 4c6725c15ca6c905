"""Who makes way for whom, exact decisions: what a gate has named comes first, in slots and on a worker's link. What is
only predicted is asked for two loads at a time."""

from __future__ import annotations

from typing import Any

from scheduler import types as t
from scheduler.simulation.scenario import Scenario
from scheduler.simulation.simulate import simulate
from scheduler.simulation.workload import random_workload
from scheduler.timing.profile import find_profile
from support.scheduling.core_driver import Driver, P, compute
from support.scheduling.policies import LastUsed


def test_a_named_expert_pre_empts_a_prediction_which_comes_back() -> None:
    d = Driver(workers=4, group=2, layers=2)
    d.open()
    d.predict(0, 3, 5)
    d.predict(1, 1, 2)
    d.loaded(0, 1, 2)
    assert d.gate(0, 3, 4, 5) == [*compute("0.0 0/3", "1.0 0/5"), "evict 2.0 1/1", "load 2.0 0/4", *compute("2.0 0/4")]
    assert (d.stats().preempted, d.stats().reloads, d.stats().unused) == (1, 1, 0)
    assert d.loaded(2) == []
    assert d.computed(2) == ["load 2.0 1/1"]
    assert d.computed(0, 1) == [f"resume 1@{P} layer 0"]
    assert d.gate(1, 1, 2) == compute("2.0 1/1", "3.0 1/2")
    assert d.computed(2, 3) == [f"resume 1@{P} layer 1"]
    assert (d.stats().loads, d.stats().reloads) == (6, 1)


def test_the_furthest_prediction_is_the_one_pre_empted() -> None:
    d = Driver(workers=1, slots=3, group=1, layers=3)
    d.open()
    assert d.predict(0, 0) + d.predict(1, 1) + d.predict(2, 2) == ["load 0.0 0/0", "load 0.1 1/1"]
    assert d.loaded(0) == ["load 0.2 2/2"]
    d.loaded(0, slot=1)
    d.loaded(0, slot=2)
    assert d.gate(0, 0, 7) == [*compute("0.0 0/0"), "evict 0.2 2/2", "load 0.2 0/7", *compute("0.2 0/7")]
    assert d.computed(0, slot=0) == ["load 0.0 2/2"]


def test_a_second_pre_emption_takes_the_next_furthest_and_they_return_nearest_first() -> None:
    d = Driver(workers=1, slots=2, group=1, layers=3)
    d.open()
    assert d.predict(1, 1) + d.predict(2, 2) == ["load 0.0 1/1", "load 0.1 2/2"]
    d.loaded(0)
    d.loaded(0, slot=1)
    assert d.gate(0, 4, 5) == [
        "evict 0.1 2/2",
        "load 0.1 0/4",
        *compute("0.1 0/4"),
        "evict 0.0 1/1",
        "load 0.0 0/5",
        *compute("0.0 0/5"),
    ]
    assert d.computed(0, slot=1) == ["load 0.1 1/1"]
    assert d.computed(0, slot=0) == [f"resume 1@{P} layer 0", "load 0.0 2/2"]


def test_a_load_under_way_for_a_named_expert_is_never_pre_empted() -> None:
    d = Driver(workers=1, group=1, layers=2)
    d.open()
    d.predict(0, 3)
    assert d.gate(0, 3, 4) == compute("0.0 0/3")
    assert d.loaded(0) == []
    assert d.computed(0) == ["load 0.0 0/4", *compute("0.0 0/4")]


def test_a_pre_empted_prediction_that_turns_out_wrong_is_not_loaded_again() -> None:
    d = Driver(workers=1, group=1, layers=2)
    d.open()
    d.predict(1, 6)
    assert d.gate(0, 2) == ["evict 0.0 1/6", "load 0.0 0/2", *compute("0.0 0/2")]
    assert d.computed(0) == [f"resume 1@{P} layer 0", "load 0.0 1/6"]
    assert d.gate(1, 7) == ["evict 0.0 1/6", "load 0.0 1/7", *compute("0.0 1/7")]


# --- on a worker's link -----------------------------------------------------------------------------------------------


def one(**fields: Any) -> Driver:
    d = Driver(**({"workers": 1, "slots": 4, "group": 1, "layers": 4} | fields))
    d.open()
    return d


def test_predicted_loads_are_asked_for_two_at_a_time() -> None:
    d = one()
    assert d.predict(0, 0, 1, 2) == ["load 0.0 0/0", "load 0.1 0/1"]
    assert d.predict(1, 3) == []
    assert d.loaded(0) == ["load 0.2 0/2"]
    assert d.loaded(0, slot=1) == ["load 0.3 1/3"]
    assert d.loaded(0, slot=2) + d.loaded(0, slot=3) == []
    assert d.gate(0, 0, 1, 2) == compute("0.0 0/0", "0.1 0/1", "0.2 0/2")
    assert d.stats().preempted == 0


def test_a_wrong_prediction_leaves_the_link_to_the_next() -> None:
    d = one()
    assert d.predict(0, 0, 1) + d.predict(1, 2, 3) == ["load 0.0 0/0", "load 0.1 0/1"]
    assert d.gate(0, 1) == ["evict 0.0 0/0", *compute("0.1 0/1"), "load 0.0 1/2"]
    assert d.loaded(0, slot=1) == ["load 0.2 1/3"]


def test_a_load_that_a_gate_waits_for_has_the_link_to_itself() -> None:
    """What was only predicted is asked for again behind it, nearest first."""
    d = one()
    assert d.predict(1, 1) + d.predict(2, 2) + d.predict(3, 3) == ["load 0.0 1/1", "load 0.1 2/2"]
    assert d.gate(0, 5) == ["evict 0.0 1/1", "evict 0.1 2/2", "load 0.0 0/5", *compute("0.0 0/5"), "load 0.1 1/1"]
    assert (d.stats().preempted, d.stats().reloads) == (2, 1)
    assert d.loaded(0) == ["load 0.2 2/2"]
    assert d.loaded(0, slot=1) == ["load 0.3 3/3"]
    assert d.computed(0) == [f"resume 1@{P} layer 0"]
    assert d.stats().loads == 6


def test_what_is_there_already_stays_where_there_is_a_slot() -> None:
    d = one()
    d.predict(1, 1)
    d.loaded(0)
    assert d.gate(0, 5, 6) == ["load 0.1 0/5", *compute("0.1 0/5"), "load 0.2 0/6", *compute("0.2 0/6")]
    assert d.stats().preempted == 0


def test_loads_that_gates_wait_for_do_not_make_way_for_each_other() -> None:
    d = one(slots=3)
    d.predict(1, 1)
    assert d.gate(0, 5, 6, 7) == [
        "evict 0.0 1/1",
        "load 0.0 0/5",
        *compute("0.0 0/5"),
        "load 0.1 0/6",
        *compute("0.1 0/6"),
        "load 0.2 0/7",
        *compute("0.2 0/7"),
    ]
    assert d.stats().preempted == 1


def test_a_prediction_that_is_named_while_another_is_before_it_on_the_link() -> None:
    """Layer 1's was predicted first. Layer 0's gate waits for the load behind it."""
    d = one()
    assert d.predict(1, 1) + d.predict(0, 0) == ["load 0.0 1/1", "load 0.1 0/0"]
    assert d.gate(0, 0) == [*compute("0.1 0/0"), "evict 0.0 1/1", "load 0.0 1/1"]
    assert d.core.snapshot().workers[0].loading == ((0, 0), (1, 1))
    assert (d.stats().preempted, d.stats().loads) == (1, 3)


def test_experts_of_one_gate_leave_each_other_the_link_in_any_order() -> None:
    d = one()
    assert d.predict(0, 7, 2) == ["load 0.0 0/7", "load 0.1 0/2"]
    assert d.gate(0, 2, 7) == compute("0.1 0/2", "0.0 0/7")
    assert d.stats().preempted == 0


def test_links_of_other_workers_are_left_alone() -> None:
    d = one(workers=2, slots=2)
    assert d.predict(0, 0) + d.predict(1, 1) == ["load 0.0 0/0", "load 1.0 1/1"]
    assert d.gate(0, 0, 5) == [
        *compute("0.0 0/0"),
        "evict 1.0 1/1",
        "load 1.0 0/5",
        *compute("1.0 0/5"),
        "load 1.1 1/1",
    ]
    assert d.stats().preempted == 1


def test_what_stays_and_is_loaded_for_nobody_makes_way_too() -> None:
    d = one(residency=LastUsed())
    assert d.predict(0, 0) == ["load 0.0 0/0"]
    assert d.gate(0, 3) == ["evict 0.0 0/0", "load 0.0 0/3", *compute("0.0 0/3", last=False)]
    assert (d.stats().unused, d.stats().preempted) == (1, 1)


def test_a_load_that_is_given_up_leaves_the_link_and_its_late_word_is_nothing() -> None:
    d = one()
    d.predict(1, 1)
    given_up = d.in_slots[0, 0].load_id
    d.gate(0, 5)
    assert d.do(t.LoadEnded(given_up, 10)) == []
    assert d.do(t.LoadFailed(given_up, "x")) == []
    assert d.loaded(0) == []
    assert d.stats().bytes_loaded == 10


def test_more_slots_are_not_slower() -> None:
    """On the paper's testbed, simulated: a second slot lets loads begin earlier, and the link rule keeps late ones
    from waiting behind them."""
    speed = []
    for slots in (1, 2, 3, 4):
        scenario = Scenario(find_profile("rtx3090-1gbe"), tokens=32, slots=slots)
        outcome = simulate(scenario, random_workload(scenario, 0.9734))
        speed.append(outcome.decode_tokens_per_s or 0.0)
    assert speed[0] < speed[1] <= speed[2] <= speed[3]
