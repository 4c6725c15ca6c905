"""A worker over the in-process transport: what a main node may ask of it, in which order, and what it hears back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint.tensors import tensor_from_bytes
from scheduler.errors import CorruptStoreError, LinkError
from wire.messages import (
    AskUsage,
    CloseRequest,
    Compute,
    Computed,
    Evict,
    Failed,
    Load,
    Loaded,
    Tensor,
    WorkerReady,
    WorkerUsage,
)
from worker_node import node as module

pytestmark = [
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("ignore:The given buffer is not writable"),
]
WAIT_S = 20.0
Expected = Callable[[Compute], torch.Tensor]
BlobOf = Callable[[int, int], bytes]
shared = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="session")
def expected(model: Any) -> Expected:
    """What Transformers' eager experts module makes of a computation's rows."""
    assert model.config._experts_implementation == "eager"

    def run(message: Compute) -> torch.Tensor:
        hidden, weights = (tensor_from_bytes(t.dtype, t.shape, t.data) for t in (message.hidden, message.weights))
        rows = len(hidden)
        with torch.inference_mode():
            experts = model.model.layers[message.layer].mlp.experts
            return experts(hidden, torch.full((rows, 1), message.expert), weights.view(rows, 1))

    return run


def same(answer: Any, asked: Compute, expected: Expected) -> bool:
    """Is `answer` the right answer to `asked`, to the last bit?"""
    assert isinstance(answer, Computed), answer
    wanted = expected(asked)
    found = tensor_from_bytes(answer.output.dtype, answer.output.shape, answer.output.data)
    return answer.call_id == asked.call_id and found.dtype == wanted.dtype and torch.equal(found, wanted)


def hear(main: Any, count: int) -> dict[tuple[str, int], Any]:
    """The next answers. A computation's may overtake that of the load before it: two threads send them."""
    found: dict[tuple[str, int], Any] = {}
    for _ in range(count):
        answer = main.next()
        key = (type(answer).__name__, getattr(answer, "load_id", 0) or getattr(answer, "call_id", 0))
        assert key not in found, "answered twice"
        found[key] = answer
    return found


def assert_loads_and_computes(main: Any, load_id: int, asked: Compute, expected: Expected) -> None:
    main.send(Load(load_id, asked.slot, asked.layer, asked.expert), asked)
    answers = hear(main, 2)
    assert set(answers) == {("Loaded", load_id), ("Computed", asked.call_id)}
    assert same(answers["Computed", asked.call_id], asked, expected)


def failure(main: Any, error: str, load_id: int = 0, call_id: int = 0) -> Failed:
    answer = main.next()
    assert isinstance(answer, Failed), answer
    assert (answer.error, answer.load_id, answer.call_id) == (error, load_id, call_id), answer
    return answer


def usage(main: Any) -> WorkerUsage:
    main.send(AskUsage())
    answer = main.next()
    assert isinstance(answer, WorkerUsage), answer
    return answer


# --- the handshake ----------------------------------------------------------------------------------------------------


def test_hello_is_answered_by_what_the_worker_is(desk: Any) -> None:
    main = desk.connect(desk.worker(slots=3))
    main.send(desk.hello())
    assert main.next() == WorkerReady(
        version=1, node="w0", slots=3, slot_bytes=desk.store.manifest.blob_bytes, device="cpu", loader="memory"
    )


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("version", 2, "protocol version"),
        ("version", 0, "protocol version"),
        ("fingerprint", "0" * 32, "model fingerprint"),
        ("fingerprint", "", "model fingerprint"),
        ("dtype", "float32", "dtype"),
    ],
)
def test_two_that_do_not_belong_together(desk: Any, field: str, value: object, what: str) -> None:
    main = desk.connect(desk.worker())
    main.send(desk.hello(**{field: value}))
    answer = failure(main, "HandshakeError")
    assert what in answer.message
    assert "w0" in answer.message
    assert "main" in answer.message
    main.send(Load(1, 0, 0, 0))
    failure(main, "ProtocolError", load_id=1)
    main.send(desk.hello())
    assert isinstance(main.next(), WorkerReady)


def test_anything_before_hello_is_refused(desk: Any) -> None:
    main = desk.connect(desk.worker())
    main.send(Load(7, 0, 0, 0), desk.compute(8, 0, 0, 0), Evict(0), AskUsage())
    for name, load_id, call_id in (("Load", 7, 0), ("Compute", 0, 8), ("Evict", 0, 0), ("AskUsage", 0, 0)):
        answer = failure(main, "ProtocolError", load_id, call_id)
        assert f"{name} came before Hello" in answer.message
    assert main.nothing_came()


def test_message_that_is_not_for_a_worker(desk: Any) -> None:
    main = desk.welcome(desk.worker())
    main.send(CloseRequest(1))
    assert "CloseRequest" in failure(main, "ProtocolError").message


# --- load, compute, evict ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("expert", range(4))
def test_load_and_compute_as_transformers_eager(
    desk: Any, expected: Expected, blob: BlobOf, layer: int, expert: int
) -> None:
    worker = desk.worker()
    main = desk.welcome(worker)
    main.send(Load(5, 1, layer, expert))
    loaded = main.next()
    assert isinstance(loaded, Loaded)
    assert (loaded.load_id, loaded.nbytes) == (5, len(blob(layer, expert)))
    assert loaded.seconds >= 0
    assert bytes(worker.slots.buffers[1].numpy()) == blob(layer, expert)
    for call, rows in ((1, 1), (2, 2), (3, 17)):
        asked = desk.compute(call, 1, layer, expert, rows, evict=False)
        main.send(asked)
        assert same(main.next(), asked, expected)
    assert usage(main) == WorkerUsage(1, worker.slots.allocated_bytes, 1, len(blob(layer, expert)))


def test_experts_that_follow_each_other_in_one_slot(desk: Any, expected: Expected) -> None:
    """What is bound to the slot once must see what was loaded since."""
    main = desk.welcome(desk.worker(slots=1))
    for number in range(12):
        layer, expert = number % 2, number * 3 % 4
        assert_loads_and_computes(main, number + 1, desk.compute(100 + number, 0, layer, expert), expected)
    assert usage(main).resident_experts_max == 1


def test_evict_frees_the_slot(desk: Any, expected: Expected) -> None:
    main = desk.welcome(desk.worker(slots=1))
    main.send(Load(1, 0, 0, 0))
    main.next()
    main.send(Evict(0), desk.compute(2, 0, 0, 0))
    assert "nothing" in failure(main, "ProtocolError", call_id=2).message
    assert_loads_and_computes(main, 3, desk.compute(4, 0, 1, 1), expected)
    assert usage(main).resident_experts_max == 1


def test_evicting_what_is_empty_or_does_not_exist_changes_nothing(desk: Any) -> None:
    main = desk.welcome(desk.worker(slots=1))
    main.send(Evict(0), Evict(0), Evict(5), Evict(-1))
    assert usage(main).resident_experts_max == 0


def test_compute_with_evict_frees_the_slot(desk: Any, expected: Expected) -> None:
    main = desk.welcome(desk.worker(slots=1))
    assert_loads_and_computes(main, 1, desk.compute(2, 0, 0, 0, evict=True), expected)
    main.send(desk.compute(3, 0, 0, 0))
    failure(main, "ProtocolError", call_id=3)
    main.send(Load(4, 0, 0, 1))
    assert isinstance(main.next(), Loaded)


def test_compute_without_evict_keeps_the_slot(desk: Any, expected: Expected) -> None:
    main = desk.welcome(desk.worker(slots=1))
    assert_loads_and_computes(main, 1, desk.compute(2, 0, 0, 0, evict=False), expected)
    main.send(Load(3, 0, 0, 1))
    failure(main, "ProtocolError", load_id=3)
    main.send(desk.compute(4, 0, 0, 0))
    assert isinstance(main.next(), Computed)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_second_load_into_an_occupied_slot(desk: Any, expected: Expected) -> None:
    main = desk.welcome(desk.worker(slots=2))
    main.send(Load(1, 0, 0, 2))
    main.next()
    main.send(Load(2, 0, 0, 3))
    answer = failure(main, "ProtocolError", load_id=2)
    assert "slot 0" in answer.message
    assert "expert=2" in answer.message
    asked = desk.compute(3, 0, 0, 2)
    main.send(asked)
    assert same(main.next(), asked, expected)


def test_second_load_into_a_slot_that_is_loading(desk: Any, held_loader: Any) -> None:
    gate = held_loader.hold(0, 0)
    main = desk.welcome(desk.worker(loader=held_loader))
    main.send(Load(1, 0, 0, 0))
    gate.wait_for_arrival()
    main.send(Load(2, 0, 0, 1))
    failure(main, "ProtocolError", load_id=2)
    gate.open()
    assert main.next().load_id == 1


@pytest.mark.parametrize(("layer", "expert"), [(0, 1), (1, 0)])
def test_compute_of_an_expert_that_is_not_in_the_slot(desk: Any, layer: int, expert: int) -> None:
    main = desk.welcome(desk.worker())
    main.send(Load(1, 0, 0, 0))
    main.next()
    main.send(desk.compute(2, 0, layer, expert))
    answer = failure(main, "ProtocolError", call_id=2)
    assert f"not expert {expert} of layer {layer}" in answer.message
    main.send(desk.compute(3, 1, 0, 0))
    failure(main, "ProtocolError", call_id=3)
    main.send(desk.compute(4, 0, 0, 0))
    assert isinstance(main.next(), Computed)


@pytest.mark.parametrize("slot", [-1, 2, 1 << 40])
def test_slot_that_does_not_exist(desk: Any, slot: int) -> None:
    main = desk.welcome(desk.worker(slots=2))
    main.send(Load(1, slot, 0, 0))
    assert "slots 0 to 1" in failure(main, "ProtocolError", load_id=1).message
    main.send(desk.compute(2, slot, 0, 0))
    failure(main, "ProtocolError", call_id=2)


@pytest.mark.parametrize(("layer", "expert"), [(0, 4), (0, -1), (2, 0), (-1, 0)])
def test_expert_that_does_not_exist(desk: Any, layer: int, expert: int) -> None:
    main = desk.welcome(desk.worker(slots=1))
    main.send(Load(1, 0, layer, expert))
    assert f"no expert {expert} of layer {layer}" in failure(main, "StoreError", load_id=1).message
    main.send(Load(2, 0, 0, 0))
    assert isinstance(main.next(), Loaded)


@pytest.mark.parametrize(
    "hidden",
    [
        Tensor("bfloat16", (3, 31), bytes(3 * 31 * 2)),
        Tensor("bfloat16", (3, 32), bytes(10)),
        Tensor("float32", (3, 32), bytes(3 * 32 * 4)),
        Tensor("bfloat16", (2, 32), bytes(2 * 32 * 2)),
        Tensor("bfloat16", (96,), bytes(96 * 2)),
        Tensor("complex64", (3, 32), bytes(3 * 32 * 8)),
    ],
    ids=["width", "bytes", "dtype", "rows", "dims", "unknown dtype"],
)
def test_rows_that_do_not_fit_the_expert(desk: Any, expected: Expected, hidden: Tensor) -> None:
    """The call fails by its id; the slot keeps its expert until the main node says otherwise."""
    main = desk.welcome(desk.worker(slots=1))
    right = desk.compute(2, 0, 0, 0)
    main.send(Load(1, 0, 0, 0), Compute(9, 0, 0, 0, hidden, right.weights, True))
    answers = hear(main, 2)
    assert set(answers) == {("Loaded", 1), ("Failed", 9)}
    assert answers["Failed", 9].call_id == 9
    assert "w0" in answers["Failed", 9].message
    main.send(right)
    assert same(main.next(), right, expected)
    main.send(Load(3, 0, 1, 1))
    assert isinstance(main.next(), Loaded)


# --- loads and computations beside each other -------------------------------------------------------------------------


def test_compute_sent_before_its_load_has_ended_runs_after_it(desk: Any, held_loader: Any, expected: Expected) -> None:
    gate = held_loader.hold(1, 3)
    main = desk.welcome(desk.worker(loader=held_loader))
    asked = desk.compute(2, 0, 1, 3)
    main.send(Load(1, 0, 1, 3), asked)
    gate.wait_for_arrival()
    assert main.nothing_came()
    gate.open()
    answers = hear(main, 2)
    assert set(answers) == {("Loaded", 1), ("Computed", 2)}
    assert same(answers["Computed", 2], asked, expected)


@pytest.mark.parametrize("early", [0, 1, 3, 5], ids=lambda n: f"{n} of them before the load has ended")
def test_chunks_keep_their_order_and_the_last_evicts(
    desk: Any, held_loader: Any, expected: Expected, early: int
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
        assert same(answer, asked, expected)
    main.send(Load(2, 0, 0, 2))
    assert isinstance(main.next(), Loaded)


def test_load_goes_on_while_another_slot_computes(desk: Any, held_arithmetic: Any, expected: Expected) -> None:
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
    assert same(main.next(), first, expected)
    assert same(main.next(), second, expected)
    assert usage(main).resident_experts_max == 2


def test_compute_goes_on_while_another_slot_loads(desk: Any, held_loader: Any, expected: Expected) -> None:
    gate = held_loader.hold(1, 1)
    main = desk.welcome(desk.worker(slots=2, loader=held_loader))
    main.send(Load(1, 0, 0, 0))
    main.next()
    main.send(Load(2, 1, 1, 1))
    gate.wait_for_arrival()
    asked = desk.compute(10, 0, 0, 0)
    main.send(asked)
    assert same(main.next(), asked, expected)
    gate.open()
    assert main.next().load_id == 2


def test_evict_during_a_load_gives_it_up_and_the_next_works(
    desk: Any, held_loader: Any, expected: Expected, blob: BlobOf
) -> None:
    gate = held_loader.hold(0, 0)
    worker = desk.worker(slots=1, loader=held_loader)
    main = desk.welcome(worker)
    main.send(Load(1, 0, 0, 0), desk.compute(2, 0, 0, 0))
    gate.wait_for_arrival()
    main.send(Evict(0))
    assert_loads_and_computes(main, 3, desk.compute(4, 0, 0, 1), expected)
    assert main.nothing_came(), "a load that was given up is not answered"
    assert not gate.opened.is_set()
    assert held_loader.begun == [(0, 0), (0, 1)]
    found = usage(main)
    assert found.resident_experts_max == 1
    assert found.bytes_loaded == len(blob(0, 1))


def test_evict_of_a_load_that_has_not_begun(desk: Any, held_loader: Any) -> None:
    gate = held_loader.hold(0, 0)
    main = desk.welcome(desk.worker(slots=2, loader=held_loader))
    main.send(Load(1, 0, 0, 0))
    gate.wait_for_arrival()
    main.send(Load(2, 1, 0, 1), Evict(1), Load(3, 1, 0, 2))
    gate.open()
    assert [main.next().load_id for _ in range(2)] == [1, 3]
    assert held_loader.begun == [(0, 0), (0, 2)]


def test_evict_during_a_computation_waits_for_it(
    desk: Any, held_loader: Any, held_arithmetic: Any, expected: Expected
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
    assert same(answers["Computed10"], first, expected)
    assert same(answers["Computed11"], second, expected)
    assert usage(main).resident_experts_max == 1


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), CorruptStoreError("it is cut"), RuntimeError("torch says no")]
)
def test_loader_that_fails_names_its_load_and_the_worker_goes_on(
    desk: Any, held_loader: Any, expected: Expected, error: Exception
) -> None:
    held_loader.errors[0, 1] = error
    main = desk.welcome(desk.worker(slots=2, loader=held_loader))
    main.send(Load(1, 0, 0, 1))
    answer = failure(main, type(error).__name__, load_id=1)
    assert str(error) in answer.message
    assert_loads_and_computes(main, 2, desk.compute(11, 1, 1, 0), expected)
    main.send(Evict(0))
    assert_loads_and_computes(main, 3, desk.compute(10, 0, 0, 1), expected)
    assert usage(main).resident_experts_max == 1


def test_load_that_waits_too_long_for_its_slot_is_named(
    desk: Any, held_arithmetic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLOT_DEADLINE_S", 0.05)
    gate = held_arithmetic.hold(0)
    main = desk.welcome(desk.worker(slots=1, arithmetic=held_arithmetic))
    main.send(Load(1, 0, 0, 0), desk.compute(2, 0, 0, 0))
    main.next()
    gate.wait_for_arrival()
    main.send(Evict(0), Load(3, 0, 0, 1))
    assert "slot 0" in failure(main, "DeadlineError", load_id=3).message
    gate.open()
    assert isinstance(main.next(), Computed)
    main.send(Evict(0), Load(4, 0, 0, 1))
    assert main.next().load_id == 4


# --- streams come and go ----------------------------------------------------------------------------------------------


def test_second_main_node_takes_over(desk: Any, held_loader: Any, expected: Expected) -> None:
    gate = held_loader.hold(0, 0)
    worker = desk.worker(slots=2, loader=held_loader)
    first = desk.welcome(worker)
    first.send(Load(1, 1, 1, 1))
    first.next()
    first.send(Load(2, 0, 0, 0), Load(3, 1, 0, 0))
    failure(first, "ProtocolError", load_id=3)
    gate.wait_for_arrival()
    second = desk.connect(worker)
    second.send(Load(4, 0, 0, 1))
    failure(second, "ProtocolError", load_id=4)
    assert first.ends == []
    second.send(desk.hello())
    failure(first, "LinkError")
    assert first.ends == [None]
    assert isinstance(second.next(), WorkerReady)
    for slot in (0, 1):
        assert_loads_and_computes(second, 5 + slot, desk.compute(10 + slot, slot, 1, 2), expected)
    with pytest.raises(LinkError):
        first.send(Load(9, 0, 0, 3))
    assert first.nothing_came()
    assert second.nothing_came()
    assert usage(second).resident_experts_max <= 2


def test_a_stranger_does_not_disturb_the_main_node(desk: Any, expected: Expected) -> None:
    """Who is refused, or says nothing, replaces nobody."""
    worker = desk.worker()
    main, stranger, silent = desk.welcome(worker), desk.connect(worker), desk.connect(worker)
    stranger.send(desk.hello(fingerprint="another"))
    failure(stranger, "HandshakeError")
    assert_loads_and_computes(main, 1, desk.compute(2, 0, 1, 2), expected)
    assert main.ends == []
    assert silent.nothing_came()


def test_main_node_that_leaves_and_comes_back(desk: Any, held_loader: Any, expected: Expected) -> None:
    gate = held_loader.hold(0, 0)
    worker = desk.worker(slots=1, loader=held_loader)
    for number in range(3):
        main = desk.welcome(worker)
        assert_loads_and_computes(main, 1, desk.compute(2, 0, 0, number + 1), expected)
        main.send(Load(3, 0, 0, 0))
        gate.wait_for_arrival()
        main.channel.close()
        assert main.ends == [None]
        with pytest.raises(LinkError, match="connect"):
            main.send(AskUsage())
    assert usage(desk.welcome(worker)).resident_experts_max == 1


def test_close_leaves_no_thread(desk: Any, held_loader: Any) -> None:
    """Not even with a load under way."""
    before = set(threading.enumerate())
    gate = held_loader.hold(0, 0)
    worker = desk.worker(slots=2, loader=held_loader)
    main = desk.welcome(worker)
    assert len(set(threading.enumerate()) - before) == 2
    main.send(Load(1, 0, 0, 0), Load(2, 1, 0, 1), desk.compute(3, 0, 0, 0))
    gate.wait_for_arrival()
    worker.close()
    assert set(threading.enumerate()) <= before
    assert main.nothing_came()
    worker.close()
    assert main.nothing_came()


def test_close_of_one_that_nobody_called(desk: Any) -> None:
    desk.worker().close()


# --- any stream of messages -------------------------------------------------------------------------------------------

places = st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 3))
steps = st.lists(st.tuples(st.sampled_from(["load", "chunks", "compute", "evict"]), places), max_size=25)


@settings(shared, max_examples=40)
@given(slots=st.integers(1, 3), stream=steps)
def test_any_valid_stream_is_answered_right_and_never_holds_more_than_its_slots(
    desk: Any, expected: Expected, slots: int, stream: list[tuple[str, tuple[int, int, int]]]
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
            assert same(answer, call, expected)
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
    assert usage(main).resident_experts_max <= min(slots, most)
    worker.close()


@settings(shared, max_examples=40)
@given(data=st.data())
def test_any_stream_at_all_leaves_a_worker_that_works(desk: Any, expected: Expected, data: st.DataObject) -> None:
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
            main.send(Evict(data.draw(slot)) if what == "evict" else desk.hello())
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
        assert same(answers[asked.call_id], asked, expected)
    while not main.nothing_came():
        main.next()
    assert usage(main).resident_experts_max <= 2
    worker.close()
