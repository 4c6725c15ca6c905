"""No worker is there, exact decisions: what requests need waits, and gets a worker when one joins."""

from __future__ import annotations

import pytest

from scheduler import types as t
from scheduler.core.machine import MAX_FAILURES
from scheduler.policies.placement import HostOnly
from scheduler.policies.residency.lru import Static
from support.scheduling.core_driver import Driver, P, compute, in_place


def alone(**fields: object) -> Driver:
    """One worker; no alignment, so that all commands are about experts."""
    return Driver(**({"workers": 1, "group": 1, "shadow": False} | fields))  # type: ignore[arg-type]


def waiting(d: Driver) -> list[tuple[int, int]]:
    """Layer and number of each expert that waits for a worker."""
    return [tuple(expert) for expert in d.core.snapshot().waiting]


def join(d: Driver, worker: int = 0, slots: int = 1) -> list[str]:
    return d.do(t.WorkerJoined(worker, slots))


# --- what waits -------------------------------------------------------------------------------------------------------


def test_what_the_last_worker_was_to_compute_is_computed_once_by_the_next_that_joins() -> None:
    d = alone(mini_batch=1)
    d.open()
    d.now = 10.0
    d.gate(0, rows={3: 2, 5: 1})
    d.loaded(0)
    first, second = d.calls[0, 0]
    assert d.computed(0) == []  # one of 3's two rows is back
    d.now = 12.0
    assert d.lose(0) == []
    assert waiting(d) == [(0, 3), (0, 5)]
    for stale in (t.ComputeEnded(first.call_id), t.ComputeEnded(second.call_id)):
        assert d.do(stale) == []
    d.now = 72.0
    assert join(d, 4) == ["load 4.0 0/3", f"compute 4.0 0/3 1@{P} 0:1", f"compute 4.0 0/3 1@{P} 1:2 last"]
    assert waiting(d) == []
    d.loaded(4)
    assert d.computed(4) == []
    assert d.computed(4) == ["load 4.0 0/5", *compute("4.0 0/5")]
    d.now = 75.0
    d.loaded(4)
    assert d.computed(4) == [f"resume 1@{P} layer 0"]
    assert (d.stats().stall_s, d.stats().loads, d.in_slots) == (65.0, 3, {})


def test_predictions_and_gates_go_on_while_no_worker_is_there() -> None:
    d = alone(workers=2, group=2)
    d.open()
    d.lose(0)
    d.lose(1)
    assert d.predict(0, 3, 5) == []
    assert d.predict(1, 1, 2) == []
    assert waiting(d) == [(0, 3), (0, 5), (1, 1), (1, 2)]
    assert d.gate(0, 3, 4) == []  # 5 was wrong, nobody had predicted 4
    assert sorted(waiting(d)) == [(0, 3), (0, 4), (1, 1), (1, 2)]
    assert d.predict(1, 2, 6) == []
    assert sorted(waiting(d)) == [(0, 3), (0, 4), (1, 2), (1, 6)]
    assert join(d, 0, slots=4) == ["load 0.0 0/3", *compute("0.0 0/3"), "load 0.1 0/4", *compute("0.1 0/4")]
    assert (d.stats().unused, d.stats().reloads) == (0, 1)


def test_named_experts_come_before_predicted_ones_however_long_those_have_waited() -> None:
    d = alone(workers=2)
    d.open()
    d.predict(0, 3)
    d.predict(1, 1)
    d.lose(0)
    d.lose(1)
    d.gate(0, 4)
    assert join(d) == ["load 0.0 0/4", *compute("0.0 0/4")]
    d.loaded(0)
    assert d.computed(0) == [f"resume 1@{P} layer 0", "load 0.0 1/1"]


def test_the_first_worker_that_joins_gets_everything_and_those_after_it_what_comes_then() -> None:
    d = alone(workers=0)
    d.open()
    d.predict(0, 3, 5)
    assert join(d, 0) == ["load 0.0 0/3"]
    assert join(d, 1) == []
    assert d.predict(1, 6) == ["load 1.0 1/6"]


def test_requests_that_want_the_same_expert_share_it_when_a_worker_joins() -> None:
    d = alone(workers=0)
    d.open(1)
    d.open(2)
    d.gate(0, 3, request=1)
    d.gate(0, 3, request=2)
    assert join(d) == ["load 0.0 0/3", *in_place("0.0 0/3"), *compute("0.0 0/3", at=f"2@{P}")]


def test_a_request_that_is_closed_waits_no_more() -> None:
    d = alone(workers=0)
    d.open(1)
    d.open(2)
    d.gate(0, 3, request=1)
    d.gate(0, 4, request=2)
    assert d.do(t.RequestClosed(1)) == []
    assert waiting(d) == [(0, 4)]
    assert join(d) == ["load 0.0 0/4", *compute("0.0 0/4", at=f"2@{P}")]


def test_an_expert_whose_worker_is_lost_three_times_fails_its_request() -> None:
    d = alone(layers=1)
    d.open()
    d.gate(0, 3)
    for _ in range(MAX_FAILURES - 1):
        assert d.lose(0) == []
        assert join(d) == ["load 0.0 0/3", *compute("0.0 0/3")]
    d.loaded(0)
    assert d.lose(0) == [
        "fail 1: expert 3 of layer 0 failed 3 times: worker 0 was lost while loading or computing it, the last with: "
        "cable; look into the workers' logs"
    ]
    assert d.core.idle()


def test_workers_that_all_die_at_once_count_as_one_failure() -> None:
    d = alone(workers=5)
    d.open()
    d.gate(0, 3)
    for worker in range(5):
        d.lose(worker)
    assert join(d) == ["load 0.0 0/3", *compute("0.0 0/3")]
    assert d.lose(0) == []
    assert join(d) == ["load 0.0 0/3", *compute("0.0 0/3")]
    d.loaded(0)
    assert d.computed(0) == [f"resume 1@{P} layer 0"]


def test_a_worker_that_has_loaded_an_expert_was_alive_when_it_got_it() -> None:
    d = alone(workers=3)
    d.open()
    d.gate(0, 3)
    for worker in range(2):
        d.loaded(worker)
        assert d.lose(worker) == [f"load {worker + 1}.0 0/3", *compute(f"{worker + 1}.0 0/3")]
    d.loaded(2)
    (failed,) = d.lose(2)
    assert failed.startswith("fail 1: expert 3 of layer 0 failed 3 times: worker 0, worker 1, worker 2 were lost")


def test_what_shared_a_slot_with_a_poison_is_tried_apart_from_it() -> None:
    """Two requests' rows were computed together: the second one's wait until the first one's are over."""
    d = alone(workers=1)
    d.together(1, 2)
    d.gate(0, 3, request=1)
    d.gate(0, 3, request=2)
    d.loaded(0)
    d.lose(0)
    assert join(d) == ["load 0.0 0/3", *compute("0.0 0/3")]
    assert waiting(d) == [(0, 3)]
    for _ in range(2):
        d.loaded(0)
        failed = d.lose(0)
        join(d)
    assert failed[0].startswith("fail 1: expert 3 of layer 0 failed 3 times")
    d.loaded(0)
    assert d.computed(0) == [f"resume 2@{P} layer 0"]


def test_requests_that_are_stalled_fail_and_others_go_on() -> None:
    d = alone()
    d.open(1)
    d.open(2)
    d.gate(0, 3, request=1)
    assert d.do(t.RequestsStalled("nothing for 5 s")) == ["evict 0.0 0/3", "fail 1: nothing for 5 s"]
    assert d.gate(0, 4, request=2) == ["load 0.0 0/4", *compute("0.0 0/4", at=f"2@{P}")]


def test_a_block_that_begins_while_no_worker_is_there_needs_each_expert_once() -> None:
    d = alone(workers=0)
    d.do(t.RequestOpened(1, P))
    d.do(t.TokenDecoded(1, 0))
    d.predict(0, 3, 5, at=P)
    d.predict(0, 5, 6, at=P + 1)
    d.begin((1, P, 2))
    assert sorted(waiting(d)) == [(0, 3), (0, 5), (0, 6)]
    d.gate(0, chosen=((3, 5), (5, 6)))
    once = [("0.0 0/3", "0:1"), ("0.1 0/5", "0:2"), ("0.2 0/6", "0:1")]
    assert join(d, 0, slots=3) == [c for at, rows in once for c in (f"load {at}", *compute(at, rows=rows))]


# --- prefill ----------------------------------------------------------------------------------------------------------


def test_prefill_that_plans_ahead_waits_and_then_plans_for_the_slots_that_came() -> None:
    d = alone(workers=0, experts=2, layers=3)
    assert d.prefill() == []
    assert waiting(d) == [(0, 0), (0, 1)]
    out = join(d, 0, slots=4)
    assert out == ["load 0.0 0/0", "load 0.1 0/1"]  # two on the link
    assert d.loaded(0) == ["load 0.2 1/0"]
    assert d.loaded(0, slot=1) == ["load 0.3 1/1"]


@pytest.mark.parametrize("when", ["before the gate", "after the gate", "after the loads"])
@pytest.mark.parametrize("prefill", ["ahead", "pipelined", "in-turn"])
def test_prefill_goes_on_wherever_it_was(prefill: str, when: str) -> None:
    d = alone(workers=2, slots=2, experts=4, layers=2, prefill=prefill)
    d.prefill()
    if when != "before the gate":
        d.gate(0, at=0, rows={0: 4, 1: 2, 3: 1})
    if when == "after the loads":
        for worker, slot in list(d.in_slots):
            d.loaded(worker, slot=slot)
    d.lose(0)
    d.lose(1)
    if when == "before the gate":
        assert d.gate(0, at=0, rows={0: 4, 1: 2, 3: 1}) == []
    assert sorted(waiting(d))[:3] == [(0, 0), (0, 1), (0, 3)]
    rows: dict[int, int] = {}
    resumed = []
    out = join(d, 5, slots=4)
    while True:
        for c in d.raw:
            if isinstance(c, t.Compute):
                rows[c.expert.expert] = rows.get(c.expert.expert, 0) + c.stop - c.start
        resumed += [line for line in out if line.startswith("resume")]
        unloaded = [place for place, load in d.in_slots.items() if load.load_id in d.core.snapshot().loads]
        if resumed:
            break
        out = d.loaded(5, slot=unloaded[0][1]) if unloaded else d.computed(5, slot=d.busy[0][1])
    assert rows == {0: 4, 1: 2, 3: 1}
    assert resumed == ["resume 1@0 layer 0"]


def test_a_warm_up_waits_until_it_is_known_how_many_slots_there_are() -> None:
    policy = Static(t.ModelShape((0, 1), 4, 2))
    d = alone(slots=3, experts=4, layers=2, residency=policy, prefill="pipelined")
    d.prefill(prompt=4)
    for layer in range(2):
        d.gate(layer, at=0, rows={0: 4, 1: 2})
        for slot in (0, 1, 2):
            if d.calls[0, slot]:
                d.loaded(0, slot=slot)
                d.computed(0, slot=slot)
    d.lose(0)
    assert d.do(t.TokenDecoded(1, 0)) == []
    assert policy.hot == ()
    assert waiting(d) == []
    assert join(d, 0, slots=4) == ["load 0.0 0/0", "load 0.1 1/0"]  # of four slots two are for what may not stay
    assert policy.hot == ((0, 0), (1, 0))
    assert join(d, 1, slots=4) == []  # once only


def test_a_warm_up_that_was_under_way_is_taken_up_again() -> None:
    policy = Static(t.ModelShape((0, 1), 4, 2))
    d = alone(slots=4, experts=4, layers=2, residency=policy, prefill="pipelined")
    d.prefill(prompt=4)
    policy.on_gate_fired(t.Visit(1, 0, 0), {2: 3, 3: 4}, (), prefill=True)
    assert d.do(t.TokenDecoded(1, 0)) == ["load 0.0 0/3", "load 0.1 0/2"]
    assert d.lose(0) == []
    assert join(d, 0, slots=4) == ["load 0.0 0/3", "load 0.1 0/2"]


# --- how it ends ------------------------------------------------------------------------------------------------------


def test_when_nobody_came_in_time_every_open_request_fails_with_the_reason() -> None:
    d = Driver(workers=2, group=1)
    d.open(1)
    d.open(2)
    d.predict(0, 3)
    d.gate(0, 3)
    assert d.lose(1) == []
    assert d.lose(0, "power cut") == []
    assert d.core.shortfall == d.core.snapshot().shortfall == "the last worker is gone: power cut"
    assert d.do(t.WorkerWaitExpired("no worker for 60 s")) == [
        "unfollow 1",
        "fail 1: no worker for 60 s",
        "unfollow 2",
        "fail 2: no worker for 60 s",
    ]
    assert d.core.idle()
    assert d.gate(1, 3) == []
    assert d.do(t.RequestClosed(1)) == []
    assert join(d) == []
    d.open(4)
    assert d.predict(0, 3, request=4) == ["load 0.0 0/3"]


def test_requests_that_fail_together_wait_for_no_gate_of_each_other() -> None:
    d = alone(mixed=(1, 0), placement=HostOnly())
    d.together(1, 2)
    d.lose(0)
    d.gate(0, 3, request=2)
    assert d.do(t.WorkerWaitExpired("too long")) == ["fail 1: too long", "fail 2: too long"]  # nothing for the host


def test_a_request_that_is_opened_after_others_have_waited_in_vain_waits_anew() -> None:
    d = alone(workers=0)
    assert d.core.shortfall == "no worker is connected"
    d.open(1)
    assert d.do(t.WorkerWaitExpired("too long")) == ["fail 1: too long"]
    assert d.open(2) == []
    assert d.gate(0, 3, request=2) == []
    assert join(d) == ["load 0.0 0/3", *compute("0.0 0/3", at=f"2@{P}")]


def test_waiting_that_ends_when_workers_are_back_fails_nobody() -> None:
    d = alone()
    d.open()
    d.lose(0)
    join(d)
    assert d.core.shortfall is None
    assert d.do(t.WorkerWaitExpired("too long")) == []
    assert d.gate(0, 3) == ["load 0.0 0/3", *compute("0.0 0/3")]
