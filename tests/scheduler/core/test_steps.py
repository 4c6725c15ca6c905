"""Steps with passes of several requests, exact decisions: shared loads, departures, predictions, urgency, blocks."""

from __future__ import annotations

from collections import Counter

import pytest

from scheduler import types as t
from scheduler.core.machine import MAX_FAILURES
from scheduler.core.stats import RecallCounts
from support.scheduling.core_driver import Driver, P, compute, in_place

SECOND = f"2@{P}"
THIRD = f"3@{P}"


def driver(workers: int = 2, slots: int = 1, layers: int = 2) -> Driver:
    """No alignment, so that all commands are about experts."""
    return Driver(workers=workers, slots=slots, group=min(workers, 2), layers=layers, shadow=False)


def resumed(*visits: str, layer: int = 0) -> list[str]:
    return [f"resume {visit} layer {layer}" for visit in visits]


# --- a layer's gates are one ------------------------------------------------------------------------------------------


def test_two_requests_share_an_expert_one_load_two_computations_and_it_leaves_with_the_last() -> None:
    d = driver()
    d.together(1, 2)
    assert d.gate(0, 3, request=1) == []
    assert d.gate(0, 3, request=2) == ["load 0.0 0/3", *in_place("0.0 0/3"), *compute("0.0 0/3", at=SECOND)]
    assert d.loaded(0) == []
    assert d.computed(0) == resumed(f"1@{P}")
    assert d.in_slots
    assert d.computed(0) == resumed(SECOND)
    assert d.in_slots == {}
    assert [(d.stats(r).loads, d.stats(r).reloads, d.stats(r).reused) for r in (1, 2)] == [(1, 1, 0), (0, 0, 1)]


def test_each_passs_rows_are_computed_by_themselves() -> None:
    """A prompt's chunk beside a decoding pass: products keep the shapes of a lone request."""
    d = Driver(workers=1, layers=1, shadow=False, mini_batch=2, prefill="pipelined")
    d.together(1)
    d.gate(0, 7, request=1)
    d.loaded(0)
    d.computed(0)
    d.do(t.RequestOpened(2, 5))
    d.do(t.TokenDecoded(1, 1))
    d.begin((1, P + 1), (2, 0, 3), prefill=[2])
    d.gate(0, 3, at=P + 1)
    assert d.gate(0, at=0, request=2, rows={3: 3}) == [
        "load 0.0 0/3",
        *in_place("0.0 0/3", at=f"1@{P + 1}"),
        *in_place("0.0 0/3", at="2@0", rows="0:2"),
        *compute("0.0 0/3", at="2@0", rows="2:3"),
    ]


def test_nothing_follows_from_a_gate_before_all_of_the_step_have_fired() -> None:
    d = driver(workers=3, slots=2)
    d.together(1, 2, 3)
    d.predict(0, 3, 5, request=1)
    d.predict(0, 5, 6, request=2)
    d.predict(0, 4, request=3)
    there = dict(d.where)
    assert d.gate(0, 3, request=1) == []  # 5 was wrong
    assert d.gate(0, 1, request=3) == []  # 4 was wrong, 1 is to be loaded
    assert d.where == there
    out = d.gate(0, 5, request=2)
    assert sum(line.startswith("compute") for line in out) == 3
    assert sum(line.startswith("evict") for line in out) == 2  # 4 and 6; request 2 needs 5
    assert [line.split()[2] for line in out if line.startswith("load")] == ["0/1"]


def test_a_pass_that_is_ahead_waits_for_the_others_at_its_next_gate() -> None:
    d = driver()
    d.together(1, 2)
    d.gate(0, 3, request=1)
    d.gate(0, 4, request=2)
    d.loaded(0, 1)
    assert d.computed(0) == resumed(f"1@{P}")
    assert d.gate(1, 5, request=1) == []  # request 2 has not left layer 0
    assert d.computed(1) == resumed(SECOND)
    out = d.gate(1, 5, request=2)
    assert [line for line in out if line.startswith("load")] == ["load 0.0 1/5"]
    assert len(out) == 3


def test_different_experts_are_loaded_side_by_side_and_each_visit_goes_on_by_itself() -> None:
    d = driver()
    d.together(1, 2)
    d.gate(0, 3, request=1)
    assert d.gate(0, 4, request=2) == [
        "load 0.0 0/3",
        *compute("0.0 0/3"),
        "load 1.0 0/4",
        *compute("1.0 0/4", at=SECOND),
    ]
    d.loaded(0, 1)
    assert d.computed(1) == resumed(SECOND)
    assert d.computed(0) == resumed(f"1@{P}")


def test_more_experts_than_slots_come_one_after_the_other() -> None:
    """Eight requests, one worker, one slot: what all of them need is loaded once."""
    d = Driver(workers=1, group=1, layers=1, experts=9, shadow=False)
    requests = range(1, 9)
    d.together(*requests)
    for request in requests:
        out = d.gate(0, request - 1, 8, request=request)
    while d.busy:
        if d.core.snapshot().loads:
            out += d.loaded(0)
        out += d.computed(0)
    assert Counter(line.split()[0] for line in out) == {"load": 9, "compute": 16, "resume": 8}
    assert sum(d.stats(request).loads for request in requests) == 9
    assert sum(d.stats(request).reused for request in requests) == 7


def test_an_expert_that_only_one_predicted_is_no_reload_for_it() -> None:
    d = driver()
    d.together(1, 2)
    assert d.predict(0, 3, request=2) == ["load 0.0 0/3"]
    d.loaded(0)
    d.gate(0, 3, request=1)
    out = d.gate(0, 3, request=2)
    assert sorted(out) == sorted([*in_place("0.0 0/3"), *compute("0.0 0/3", at=SECOND)])
    assert [(d.stats(r).loads, d.stats(r).reloads, d.stats(r).present) for r in (1, 2)] == [(0, 0, 1), (1, 0, 1)]
    assert [d.stats(r).in_time for r in (1, 2)] == [0, 0]  # nothing predicts: there is no shadow


def test_what_is_wrong_for_one_and_right_for_the_other_is_kept_and_not_loaded_again() -> None:
    d = driver()
    d.together(1, 2)
    assert d.predict(0, 3, request=1) == ["load 0.0 0/3"]
    d.gate(0, 4, request=1)
    out = d.gate(0, 3, request=2)
    assert sorted(out) == sorted(["load 1.0 0/4", *compute("1.0 0/4"), *compute("0.0 0/3", at=SECOND)])
    d.loaded(0, 1)
    assert sorted([*d.computed(0), *d.computed(1)]) == resumed(f"1@{P}", SECOND)
    assert (d.stats(1).loads + d.stats(2).loads, d.stats(2).reused, d.in_slots) == (2, 1, {})


# --- who leaves, and who comes back -----------------------------------------------------------------------------------


def test_one_closes_while_the_other_waits_for_its_gate() -> None:
    d = driver()
    d.together(1, 2)
    d.predict(0, 3, request=1)
    d.predict(0, 4, request=2)
    assert d.gate(0, 3, request=1) == []
    assert d.do(t.RequestClosed(2)) == [*compute("0.0 0/3"), "evict 1.0 0/4"]
    d.loaded(0)
    assert d.computed(0) == resumed(f"1@{P}")
    assert d.gate(1, 5, request=1) == ["load 0.0 1/5", *compute("0.0 1/5")]  # it is alone now


def test_one_closes_when_both_wait_for_the_third() -> None:
    d = driver(workers=3)
    d.together(1, 2, 3)
    assert d.gate(0, 3, request=1) == []
    assert d.gate(0, 3, request=2) == []
    assert d.do(t.RequestClosed(1)) == []
    assert d.gate(0, 3, request=3) == ["load 0.0 0/3", *in_place("0.0 0/3", at=SECOND), *compute("0.0 0/3", at=THIRD)]


@pytest.mark.parametrize("leaves", [1, 2])
def test_one_closes_while_a_shared_expert_is_computed(leaves: int) -> None:
    """The call after which the worker evicts may be that of the request that left."""
    d = driver(workers=1)
    d.together(1, 2)
    d.gate(0, 3, request=1)
    d.gate(0, 3, request=2)
    d.loaded(0)
    calls = {call.visit.request: call.call_id for call in d.calls[0, 0]}
    assert d.do(t.RequestClosed(leaves)) == []
    stays = 3 - leaves
    assert d.do(t.ComputeEnded(calls[leaves])) == []
    out = d.do(t.ComputeEnded(calls[stays]))
    evicted = ["evict 0.0 0/3"] if leaves == 2 else []
    assert sorted(out) == [*evicted, *resumed(f"{stays}@{P}")]
    d.in_slots.clear()
    assert d.gate(1, 4, request=stays)[0] == "load 0.0 1/4"


def test_both_close() -> None:
    d = driver(workers=1)
    d.together(1, 2)
    d.gate(0, 3, request=1)
    d.gate(0, 3, request=2)
    assert d.do(t.RequestClosed(1)) == []
    assert d.do(t.RequestClosed(2)) == ["evict 0.0 0/3"]
    assert d.core.idle()


def test_a_request_that_fails_lets_the_others_go_on() -> None:
    d = driver()
    d.together(1, 2)
    d.gate(0, 3, request=1)
    d.gate(0, 4, request=2)
    d.loaded(0)
    d.computed(0)
    d.gate(1, 5, request=1)
    worker = next(worker for worker, expert in d.where.items() if expert == (0, 4))
    for _ in range(2):
        d.load_failed(worker)
        worker = next(worker for worker, expert in d.where.items() if expert == (0, 4))
    out = d.load_failed(worker)
    assert sum(line.startswith("fail 2") for line in out) == 1
    assert [line.split()[2] for line in out if line.startswith("load")] == ["1/5"]
    assert [line.split()[3] for line in out if line.startswith("compute")] == [f"1@{P}"]


def test_a_pass_of_a_request_that_is_not_open_any_more_is_not_waited_for() -> None:
    d = driver()
    d.together(1, 2)
    d.do(t.RequestClosed(2))
    d.begin((1, P + 1), (2, P + 1))
    assert d.gate(0, 3, at=P + 1) == ["load 0.0 0/3", *compute("0.0 0/3", at=f"1@{P + 1}")]


def test_the_last_worker_is_lost_while_a_gate_waits_for_another() -> None:
    d = driver(workers=1)
    d.together(1, 2)
    d.gate(0, 3, request=1)
    assert d.lose(0) == []
    assert d.do(t.WorkerWaitExpired("too long")) == ["fail 1: too long", "fail 2: too long"]
    assert d.core.idle()


def test_gates_are_united_while_no_worker_is_there() -> None:
    d = driver(workers=1)
    d.together(1, 2)
    d.gate(0, 3, request=1)
    assert d.lose(0) == []
    assert d.gate(0, 3, request=2) == []
    both = [*in_place("0.0 0/3"), *compute("0.0 0/3", at=f"2@{P}")]
    assert d.do(t.WorkerJoined(0, 1)) == ["load 0.0 0/3", *both]


def test_what_was_prefetched_for_a_request_that_leaves_serves_the_others() -> None:
    d = driver()
    d.together(1, 2)
    assert d.predict(0, 3, request=2) == ["load 0.0 0/3"]
    d.gate(0, 3, request=1)
    assert d.do(t.RequestClosed(2)) == in_place("0.0 0/3")
    d.loaded(0)
    assert d.computed(0) == ["evict 0.0 0/3", *resumed(f"1@{P}")]
    assert d.core.idle() is False
    d.do(t.RequestClosed(1))
    assert d.core.idle()


def test_a_prediction_is_late_once_its_own_gate_has_fired() -> None:
    """Whenever the others' gates fire: a request's figures are its own."""
    d = Driver(workers=2, layers=1)
    d.together(1, 2)
    d.gate(0, 3, request=1)
    assert d.predict(0, 3, 4, request=1) == []
    assert d.predict(0, 5, request=2) != []
    assert (d.stats(1).late, d.stats(1).in_time, d.stats(2).late) == (1, 0, 0)
    assert d.stats(1).by_index == [RecallCounts(1, 1)]


def over(d: Driver, layer: int, *requests: int, at: int = P) -> None:
    """All experts of the requests' layer are loaded and computed."""
    for place, load in list(d.in_slots.items()):
        if load.load_id in d.core.snapshot().loads:
            d.loaded(place[0], slot=place[1])
    while d.busy:
        worker, slot = d.busy[0]
        d.computed(worker, slot=slot)


def test_a_request_returns_after_a_pause() -> None:
    d = driver(layers=1)
    d.together(1, 2)
    d.gate(0, 3, request=1)
    d.gate(0, 4, request=2)
    over(d, 0)
    d.do(t.TokenDecoded(1, 1))
    d.do(t.TokenDecoded(2, 1))
    d.begin((1, P + 1))
    d.gate(0, 3, at=P + 1)  # alone: nobody waits for request 2
    over(d, 0)
    d.do(t.TokenDecoded(1, 2))
    d.begin((2, P + 1), (1, P + 2))
    assert d.gate(0, 3, at=P + 2) == []
    out = d.gate(0, 3, at=P + 1, request=2)
    assert [line.split()[0] for line in out] == ["load", "compute", "compute"]


# --- urgency ----------------------------------------------------------------------------------------------------------


def test_what_is_needed_first_is_loaded_first_whenever_it_was_predicted() -> None:
    d = driver(workers=1, layers=3)
    d.together(1, 2)
    d.gate(0, 7, request=1)
    d.gate(0, 7, request=2)
    d.predict(2, 1, request=1)
    d.predict(0, 2, at=P + 1, request=1)
    d.predict(1, 3, request=2)
    d.loaded(0)
    d.computed(0)
    assert d.computed(0) == [*resumed(SECOND), "load 0.0 1/3"]
    d.gate(1, 3, request=1)
    d.gate(1, 3, request=2)
    d.loaded(0)
    d.computed(0)
    assert d.computed(0) == [*resumed(SECOND, layer=1), "load 0.0 2/1"]


def test_a_prediction_that_is_replaced_has_the_urgency_of_its_layer() -> None:
    d = driver(workers=1, layers=4)
    d.together(1)
    d.gate(0, 7)
    d.predict(1, 1)
    d.predict(2, 2)
    d.predict(3, 3)
    d.predict(1, 4)  # in place of 1; it comes last and is needed first
    d.loaded(0)
    assert d.computed(0) == [*resumed(f"1@{P}"), "load 0.0 1/4"]


def test_a_request_that_is_not_in_the_step_loses_its_prefetches_to_those_that_are() -> None:
    d = driver(workers=1, layers=1)
    d.together(1, 2)
    d.gate(0, 7, request=1)
    d.gate(0, 7, request=2)
    over(d, 0)
    d.do(t.TokenDecoded(1, 1))
    d.do(t.TokenDecoded(2, 1))
    assert d.predict(0, 4, at=P + 1, request=2) == ["load 0.0 0/4"]
    d.begin((1, P + 1))
    assert d.predict(0, 5, at=P + 1, request=1) == ["evict 0.0 0/4", "load 0.0 0/5"]
    d.loaded(0)
    d.gate(0, 5, at=P + 1)
    assert d.computed(0) == [*resumed(f"1@{P + 1}"), "load 0.0 0/4"]
    assert (d.stats(2).preempted, d.stats(1).preempted) == (1, 0)


def test_a_load_in_flight_for_a_request_that_is_not_in_the_step_yields_its_link() -> None:
    d = driver(workers=1, slots=3, layers=1)
    d.together(1, 2)
    d.gate(0, 7, request=1)
    d.gate(0, 7, request=2)
    over(d, 0)
    d.do(t.TokenDecoded(1, 1))
    d.do(t.TokenDecoded(2, 1))
    assert d.predict(0, 3, 4, at=P + 1, request=2) == ["load 0.0 0/3", "load 0.1 0/4"]
    d.begin((1, P + 1))
    assert d.predict(0, 5, at=P + 1, request=1) == ["evict 0.1 0/4", "load 0.1 0/5"]


def test_a_prediction_shared_by_two_leaves_only_when_neither_has_it() -> None:
    d = driver(workers=2)
    d.together(1, 2)
    assert d.predict(1, 3, request=1) == ["load 0.0 1/3"]
    assert d.predict(1, 3, request=2) == []
    assert d.predict(1, 4, request=1) == ["load 1.0 1/4"]  # replaced: request 2 still expects 3
    assert d.predict(1, 4, request=2) == ["evict 0.0 1/3"]


# --- blocks -----------------------------------------------------------------------------------------------------------


def test_a_block_of_three_rows_with_shared_experts() -> None:
    d = driver(workers=2, slots=2)
    d.together(1, rows=3)
    d.predict(0, 3, 5, at=P)
    d.predict(0, 3, 6, at=P + 1)
    d.predict(0, 5, 3, at=P + 2)
    assert sorted(load.expert.expert for load in d.in_slots.values()) == [3, 5, 6]
    for worker, slot in list(d.in_slots):
        d.loaded(worker, slot=slot)
    out = d.gate(0, chosen=((3, 5), (3, 6), (5, 3)))
    assert sorted(line.split(maxsplit=2)[2] for line in out) == [
        f"0/3 1@{P} 0:3 last",
        f"0/5 1@{P} 0:2 last",
        f"0/6 1@{P} 0:1 last",
    ]
    assert (d.stats().loads, d.stats().reused, d.stats().named, d.stats().present) == (3, 0, 6, 6)


def test_a_row_that_nothing_predicted_keeps_the_others_prefetches() -> None:
    d = driver(workers=4)
    d.together(1, rows=2)
    d.predict(0, 3, at=P + 1)
    out = d.gate(0, chosen=((4,), (3,)))
    assert [line.split()[2] for line in out if line.startswith("load")] == ["0/4"]
    assert not any(line.startswith("evict") for line in out)
    assert (d.stats().reloads, d.stats().loads) == (1, 2)


def test_a_prefetch_that_failed_too_often_was_predicted_in_a_block_too() -> None:
    d = driver(workers=1, slots=2)
    d.together(1)
    d.predict(0, 3, at=P + 2)
    for _ in range(MAX_FAILURES):
        d.load_failed(0)
    assert d.in_slots == {}
    d.do(t.TokenDecoded(1, 1))
    d.begin((1, P + 1, 2))
    assert d.predict(0, 5, at=P + 1) == ["load 0.0 0/5"]  # which is no reason to try 0/3 again
    assert d.gate(0, at=P + 1, chosen=((5,), (3,)))[1:2] == ["load 0.1 0/3"]
    assert d.stats().reloads == 0


def test_recall_counts_each_row_of_a_block() -> None:
    d = Driver(workers=4, layers=1, slots=4)
    d.together(1, rows=3)
    d.predict(0, 3, 5, at=P)
    d.predict(0, 3, 6, at=P + 2)
    d.gate(0, chosen=((3, 5), (1, 2), (3, 4)))
    d.predict(0, 1, 7, at=P + 1)  # late
    stats = d.stats()
    assert stats.by_index == [RecallCounts(2, 2), RecallCounts(1, 2), RecallCounts(1, 2)]
    assert (stats.in_time, stats.late, stats.unpredicted) == (3, 1, 0)


def test_a_block_is_cut_back_and_its_last_rows_are_read_again() -> None:
    """One of three rows was right: the next pass begins at the second, with a prediction of its own."""
    d = Driver(workers=4, layers=1, slots=4)
    d.together(1, rows=3)
    for row in range(3):
        d.predict(0, 3, at=P + row)
    d.gate(0, chosen=((3,), (3,), (4,)))
    over(d, 0)
    d.do(t.TokenDecoded(1, 1))
    assert d.predict(0, 5, at=P + 1) == ["load 0.0 0/5"] or d.where  # in time: the row is to be read again
    assert d.stats().late == 0
    d.begin((1, P + 1, 2))
    out = d.gate(0, at=P + 1, chosen=((5,), (6,)))
    assert [line.split()[2] for line in out if line.startswith("load")] == ["0/6"]
    over(d, 0)
    d.do(t.RequestClosed(1))
    stats = d.stats()
    stats.close()
    assert stats.by_index == [RecallCounts(1, 1), RecallCounts(2, 2), RecallCounts(0, 1)]
    assert stats.unpredicted == 1  # the third row's second reading
    assert (stats.loads, stats.reloads) == (4, 2)


def test_a_prediction_of_a_row_beyond_the_block_stays() -> None:
    d = driver(workers=2, slots=2)
    d.together(1, rows=2)
    assert d.predict(0, 6, at=P + 2) == ["load 0.0 0/6"]
    d.loaded(0)
    assert not any(line.startswith("evict") for line in d.gate(0, chosen=((3,), (4,))))
    assert d.in_slots[0, 0].expert == (0, 6)
    d.do(t.RequestClosed(1))
    assert d.core.idle()
    assert d.in_slots == {}


def test_an_expert_needed_now_and_in_the_next_step_has_a_slot_for_each() -> None:
    """To share one would keep the slot from now on. A gate takes what is there, whenever it was needed."""
    d = driver(workers=1, slots=2, layers=1)
    d.together(1)
    assert d.predict(0, 3, at=P) == ["load 0.0 0/3"]
    assert d.predict(0, 3, 4, at=P + 1) == ["load 0.1 0/3"]
    d.loaded(0)
    d.loaded(0, slot=1)
    assert d.gate(0, 3) == compute("0.0 0/3")
    assert d.computed(0) == [*resumed(f"1@{P}"), "load 0.0 0/4"]
    d.token(1)
    assert d.gate(0, 3, at=P + 1) == ["evict 0.0 0/4", *compute("0.1 0/3", at=f"1@{P + 1}")]
    assert d.stats().loads == 3


def test_a_gate_takes_what_was_loaded_for_the_next_step() -> None:
    d = driver(workers=1, slots=2, layers=1)
    d.together(1)
    assert d.predict(0, 3, at=P + 1) == ["load 0.0 0/3"]
    d.loaded(0)
    assert d.gate(0, 3) == in_place("0.0 0/3")
    assert d.computed(0) == resumed(f"1@{P}")
    d.token(1)
    assert d.gate(0, 3, at=P + 1) == compute("0.0 0/3", at=f"1@{P + 1}")
    assert (d.stats().loads, d.stats().reused, d.stats().present) == (1, 1, 2)
