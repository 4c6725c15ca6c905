"""A worker over the in-process transport: work side by side, failures, streams that come and go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.errors import CorruptStoreError, LinkError
from support.nodes.held import HeldArithmetic, HeldLoader
from support.nodes.worker_desk import NO_THREAD_FAILS, Expected, WorkerDesk
from wire.messages import AskUsage, Compute, Computed, Evict, Failed, Load, Loaded, WorkerReady, WorkerUsage
from worker_node import node as module

pytestmark = NO_THREAD_FAILS
BlobOf = Callable[[int, int], bytes]
shared = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


# --- loads and computations beside each other -------------------------------------------------------------------------


def test_compute_sent_before_its_load_has_ended_runs_after_it(
    desk: WorkerDesk, held_loader: HeldLoader, expected: Expected
) -> None:
    gate = held_loader.hold(1, 3)
    main = desk.welcome(desk.worker(loader=held_loader))
    asked = desk.compute(2, 0, 1, 3)
    main.send(Load(1, 0, 1, 3), asked)
    gate.wait_for_arrival()
    assert main.nothing_came()
    gate.open()
    answers = main.hear(2)
    assert set(answers) == {("Loaded", 1), ("Computed", 2)}
    assert expected.fits(answers["Computed", 2], asked)


@pytest.mark.parametrize("early", [0, 1, 3, 5], ids=lambda n: f"{n} of them before the load has ended")
def test_chunks_keep_their_order_and_the_last_evicts(
    desk: WorkerDesk, held_loader: HeldLoader, expected: Expected, early: int
) -> None:
    gate = held_loader.hold(0, 1)
    main = desk.welcome(desk.worker(slots=1, loader=held_loader))
    chunks = [desk.compute(10 + n, 0, 0, 1, rows=n + 1, evict=n == 4) for n in range(5)]
    main.send(Load(1, 0, 0, 1), *chunks[:early])
    gate.wait_for_arrival()
    gate.open()
    main.send(*chunks[early:])
    answers = [main.next() for _ in range(6)]
    assert sum(isinstance(answer, Loaded) for answer in answers) == 1
    for asked, answer in zip(chunks, [a for a in answers if not isinstance(a, Loaded)], strict=True):
        assert expected.fits(answer, asked)
    main.send(Load(2, 0, 0, 2))
    assert isinstance(main.next(), Loaded)


def test_load_goes_on_while_another_slot_computes(
    desk: WorkerDesk, held_arithmetic: HeldArithmetic, expected: Expected
) -> None:
    gate = held_arithmetic.hold(0)
    main = desk.welcome(desk.worker(slots=2, arithmetic=held_arithmetic))
    first, second = desk.compute(10, 0, 0, 0), desk.compute(11, 1, 1, 2)
    main.send(Load(1, 0, 0, 0), first)
    assert main.next().load_id == 1
    gate.wait_for_arrival()
    main.send(Load(2, 1, 1, 2), second)
    assert main.next().load_id == 2
    assert main.nothing_came()
    gate.open()
    assert expected.fits(main.next(), first)
    assert expected.fits(main.next(), second)
    assert main.usage().resident_experts_max == 2


def test_compute_goes_on_while_another_slot_loads(
    desk: WorkerDesk, held_loader: HeldLoader, expected: Expected
) -> None:
    gate = held_loader.hold(1, 1)
    main = desk.welcome(desk.worker(slots=2, loader=held_loader))
    main.send(Load(1, 0, 0, 0))
    main.next()
    main.send(Load(2, 1, 1, 1))
    gate.wait_for_arrival()
    asked = desk.compute(10, 0, 0, 0)
    main.send(asked)
    assert expected.fits(main.next(), asked)
    gate.open()
    assert main.next().load_id == 2


def test_evict_during_a_load_gives_it_up_and_the_next_works(
    desk: WorkerDesk, held_loader: HeldLoader, expected: Expected, blob: BlobOf
) -> None:
    gate = held_loader.hold(0, 0)
    worker = desk.worker(slots=1, loader=held_loader)
    main = desk.welcome(worker)
    main.send(Load(1, 0, 0, 0), desk.compute(2, 0, 0, 0))
    gate.wait_for_arrival()
    main.send(Evict(0))
    main.loads_and_computes(3, desk.compute(4, 0, 0, 1), expected)
    assert main.nothing_came(), "a load that was given up is not answered"
    assert not gate.opened.is_set()
    assert held_loader.begun == [(0, 0), (0, 1)]
    found = main.usage()
    assert found.resident_experts_max == 1
    assert found.bytes_loaded == len(blob(0, 1))


def test_evict_of_a_load_that_has_not_begun(desk: WorkerDesk, held_loader: HeldLoader) -> None:
    gate = held_loader.hold(0, 0)
    main = desk.welcome(desk.worker(slots=2, loader=held_loader))
    main.send(Load(1, 0, 0, 0))
    gate.wait_for_arrival()
    main.send(Load(2, 1, 0, 1), Evict(1), Load(3, 1, 0, 2))
    gate.open()
    assert [main.next().load_id for _ in range(2)] == [1, 3]
    assert held_loader.begun == [(0, 0), (0, 2)]


def test_evict_during_a_computation_waits_for_it(
    desk: WorkerDesk, held_loader: HeldLoader, held_arithmetic: HeldArithmetic, expected: Expected
) -> None:
    """The computation's slot is not written to before it has been left."""
    gate = held_arithmetic.hold(0)
    main = desk.welcome(desk.worker(slots=1, loader=held_loader, arithmetic=held_arithmetic))
    first, second = desk.compute(10, 0, 0, 0, evict=False), desk.compute(11, 0, 1, 3)
    main.send(Load(1, 0, 0, 0), first)
    main.next()
    gate.wait_for_arrival()
    main.send(Evict(0), Load(2, 0, 1, 3), second)
    assert held_loader.begun == [(0, 0)]
    assert main.nothing_came()
    gate.open()
    answers = {type(m).__name__ + str(getattr(m, "call_id", "")): m for m in (main.next() for _ in range(3))}
    assert set(answers) == {"Computed10", "Computed11", "Loaded"}
    assert expected.fits(answers["Computed10"], first)
    assert expected.fits(answers["Computed11"], second)
    assert main.usage().resident_experts_max == 1


def test_seconds_are_those_that_it_took(
    desk: WorkerDesk, held_loader: HeldLoader, held_arithmetic: HeldArithmetic
) -> None:
    """At least as long as it was held, at most as long as the asker waited."""
    loading, computing = held_loader.hold(0, 0), held_arithmetic.hold(0)
    main = desk.welcome(desk.worker(loader=held_loader, arithmetic=held_arithmetic))
    for gate, message in ((loading, Load(1, 0, 0, 0)), (computing, desk.compute(2, 0, 0, 0))):
        asked = time.monotonic()
        main.send(message)
        gate.wait_for_arrival()
        arrived = time.monotonic()
        time.sleep(0.03)
        held = time.monotonic() - arrived
        gate.open()
        seconds = main.next().seconds
        assert held <= seconds <= time.monotonic() - asked


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), CorruptStoreError("it is cut"), RuntimeError("torch says no")]
)
def test_loader_that_fails_names_its_load_and_the_worker_goes_on(
    desk: WorkerDesk, held_loader: HeldLoader, expected: Expected, error: Exception
) -> None:
    held_loader.errors[0, 1] = error
    main = desk.welcome(desk.worker(slots=2, loader=held_loader))
    main.send(Load(1, 0, 0, 1))
    answer = main.failure(type(error).__name__, load_id=1)
    assert str(error) in answer.message
    main.loads_and_computes(2, desk.compute(11, 1, 1, 0), expected)
    main.send(Evict(0))
    main.loads_and_computes(3, desk.compute(10, 0, 0, 1), expected)
    assert main.usage().resident_experts_max == 1


def test_load_that_waits_too_long_for_its_slot_is_named(
    desk: WorkerDesk, held_arithmetic: HeldArithmetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLOT_DEADLINE_S", 0.05)
    gate = held_arithmetic.hold(0)
    main = desk.welcome(desk.worker(slots=2, arithmetic=held_arithmetic))
    main.send(Load(1, 0, 0, 0), desk.compute(2, 0, 0, 0))
    main.next()
    gate.wait_for_arrival()
    main.send(Evict(0), Load(3, 0, 0, 1))
    assert "slot 0" in main.failure("DeadlineError", load_id=3).message
    monkeypatch.undo()
    gate.open()
    assert isinstance(main.next(), Computed)
    main.send(Evict(0), Load(4, 0, 0, 1))
    assert main.next().load_id == 4


def test_with_one_slot_a_load_comes_after_the_computation_before_it(
    desk: WorkerDesk, held_arithmetic: HeldArithmetic
) -> None:
    gate = held_arithmetic.hold(0)
    main = desk.welcome(desk.worker(slots=1, arithmetic=held_arithmetic))
    main.send(Load(1, 0, 0, 0), desk.compute(2, 0, 0, 0, evict=True))
    main.next()
    gate.wait_for_arrival()
    main.send(Evict(0), Load(3, 0, 0, 1), AskUsage())
    gate.open()
    assert [type(main.next()) for _ in range(3)] == [Computed, Loaded, WorkerUsage]


# --- streams come and go ----------------------------------------------------------------------------------------------


def test_a_main_node_that_connects_again_takes_over(
    desk: WorkerDesk, held_loader: HeldLoader, expected: Expected
) -> None:
    gate = held_loader.hold(0, 0)
    worker = desk.worker(slots=2, loader=held_loader)
    first = desk.welcome(worker)
    first.send(Load(1, 1, 1, 1))
    first.next()
    first.send(Load(2, 0, 0, 0), Load(3, 1, 0, 0))
    first.failure("ProtocolError", load_id=3)
    gate.wait_for_arrival()
    second = desk.connect(worker)
    second.send(Load(4, 0, 0, 1))
    second.failure("ProtocolError", load_id=4)
    assert first.ends == []
    second.send(desk.hello())
    first.failure("LinkError")
    assert first.ends == [None]
    assert isinstance(second.next(), WorkerReady)
    for slot in (0, 1):
        second.loads_and_computes(5 + slot, desk.compute(10 + slot, slot, 1, 2), expected)
    with pytest.raises(LinkError):
        first.send(Load(9, 0, 0, 3))
    assert first.nothing_came()
    assert second.nothing_came()
    assert second.usage().resident_experts_max <= 2


def test_a_stranger_does_not_disturb_the_main_node(desk: WorkerDesk, expected: Expected) -> None:
    """Who is refused, or says nothing, replaces nobody."""
    worker = desk.worker()
    main, stranger, silent = desk.welcome(worker), desk.connect(worker), desk.connect(worker)
    stranger.send(desk.hello(fingerprint="another"))
    stranger.failure("ModelMismatchError")
    main.loads_and_computes(1, desk.compute(2, 0, 1, 2), expected)
    assert main.ends == []
    assert silent.nothing_came()


def test_main_node_that_leaves_and_comes_back(desk: WorkerDesk, held_loader: HeldLoader, expected: Expected) -> None:
    gate = held_loader.hold(0, 0)
    worker = desk.worker(slots=1, loader=held_loader)
    for number in range(3):
        main = desk.welcome(worker)
        main.loads_and_computes(1, desk.compute(2, 0, 0, number + 1), expected)
        main.send(Load(3, 0, 0, 0))
        gate.wait_for_arrival()
        main.channel.close()
        assert main.ends == [None]
        with pytest.raises(LinkError, match="connect"):
            main.send(AskUsage())
    assert desk.welcome(worker).usage().resident_experts_max == 1


def test_close_leaves_no_thread(desk: WorkerDesk, held_loader: HeldLoader) -> None:
    """Not even with a load under way."""
    before = set(threading.enumerate())
    gate = held_loader.hold(0, 0)
    worker = desk.worker(slots=2, loader=held_loader)
    main = desk.welcome(worker)
    serving = {one for one in threading.enumerate() if not isinstance(one, threading.Timer)}  # Hello's deadline ends
    assert len(serving - before) == 2
    main.send(Load(1, 0, 0, 0), Load(2, 1, 0, 1), desk.compute(3, 0, 0, 0))
    gate.wait_for_arrival()
    worker.close()
    assert set(threading.enumerate()) <= before
    assert main.nothing_came()
    worker.close()
    assert main.nothing_came()


def test_close_of_one_that_nobody_called(desk: WorkerDesk) -> None:
    desk.worker().close()


# --- any stream of messages -------------------------------------------------------------------------------------------

places = st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 3))
steps = st.lists(st.tuples(st.sampled_from(["load", "chunks", "compute", "evict"]), places), max_size=25)


@settings(shared, max_examples=40)
@given(slots=st.integers(1, 3), stream=steps)
def test_any_valid_stream_is_answered_right_and_never_holds_more_than_its_slots(
    desk: WorkerDesk, expected: Expected, slots: int, stream: list[tuple[str, tuple[int, int, int]]]
) -> None:
    """Loads and computations overlap as they like; a slot is loaded again after its last answer, as the core does."""
    worker = desk.worker(slots)
    main = desk.welcome(worker)
    held: dict[int, tuple[int, int]] = {}
    asked: dict[int, Compute] = {}
    computing: dict[int, set[int]] = {slot: set() for slot in range(slots)}
    loads: list[int] = []
    most, number = 0, 0

    def take() -> None:
        answer = main.next()
        if isinstance(answer, Loaded):
            assert answer.load_id in loads
            loads.remove(answer.load_id)
        else:
            call = asked.pop(answer.call_id)
            assert expected.fits(answer, call)
            computing[call.slot].discard(call.call_id)

    for what, (wish, layer, expert) in stream:
        slot, number = wish % slots, number + 10
        while computing[slot] and (what == "evict" or slot not in held):
            take()
        if what == "load" and slot not in held:
            held[slot] = (layer, expert)
            most = max(most, len(held.keys() | {s for s, calls in computing.items() if calls}))
            loads.append(number)
            main.send(Load(number, slot, layer, expert))
        elif what == "evict" and slot in held:
            while loads:  # an evicted load may be answered or not
                take()
            del held[slot]
            main.send(Evict(slot))
        elif what in ("chunks", "compute") and slot in held:
            for part in range(3 if what == "chunks" else 1):
                call = desk.compute(number + part, slot, *held[slot], rows=part + 1, evict=what == "compute")
                asked[call.call_id] = call
                computing[slot].add(call.call_id)
                main.send(call)
            if what == "compute":
                del held[slot]
    while loads or asked:
        take()
    assert main.nothing_came()
    assert main.usage().resident_experts_max <= min(slots, most)
    worker.close()


@settings(shared, max_examples=40)
@given(data=st.data())
def test_any_stream_at_all_leaves_a_worker_that_works(
    desk: WorkerDesk, expected: Expected, data: st.DataObject
) -> None:
    """Slots and experts that do not exist, doubled loads, computations out of turn: refused, and no more than that."""
    worker = desk.worker(2)
    main = desk.welcome(worker)
    slot, layer, expert = st.integers(-1, 2), st.integers(-1, 2), st.integers(-1, 4)
    loads, calls = set(), set()
    for number in range(1, data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(["load", "compute", "evict", "hello"]))
        if what == "load":
            loads.add(number)
            main.send(Load(number, data.draw(slot), data.draw(layer), data.draw(expert)))
        elif what == "compute":
            calls.add(number)
            place = (data.draw(slot), data.draw(layer), data.draw(expert))
            main.send(desk.compute(number, *place, evict=data.draw(st.booleans())))
        else:
            main.send(Evict(max(data.draw(slot), 0)) if what == "evict" else desk.hello())
    main.send(Evict(0), Evict(1), Load(1000, 0, 0, 0), Load(1001, 1, 1, 3))
    last = [desk.compute(1002, 0, 0, 0), desk.compute(1003, 1, 1, 3)]
    main.send(*last)
    answers: dict[int, Any] = {}
    while not {1002, 1003} <= answers.keys():
        answer = main.next()
        if isinstance(answer, Loaded):
            assert answer.load_id in loads | {1000, 1001}
        elif isinstance(answer, Computed):
            assert answers.setdefault(answer.call_id, answer) is answer, "answered twice"
            assert answer.call_id in calls | {1002, 1003}
        elif isinstance(answer, Failed):
            assert answer.load_id in loads or answer.call_id in calls, answer
    for asked in last:
        assert expected.fits(answers[asked.call_id], asked)
    while not main.nothing_came():
        main.next()
    assert main.usage().resident_experts_max <= 2
    worker.close()
