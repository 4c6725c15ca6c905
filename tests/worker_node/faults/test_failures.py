"""Whatever a job of a worker raises, and wherever: its load or its computation fails by name, and its slot is free."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from checkpoint.store import ExpertStore
from scheduler.errors import CorruptStoreError, DeadlineError, ProtocolError, StoreError
from support.cases import fast_cover
from support.nodes.held import HeldArithmetic, HeldLoader
from support.nodes.worker_desk import NO_THREAD_FAILS, WAIT_S, Expected, MainEnd, WorkerDesk
from wire.lent_threads import LentThreads
from wire.messages import Computed, Evict, Failed, Load, Loaded
from worker_node import ready, session
from worker_node.loaders import load_checks
from worker_node.loaders.disk import DiskLoader
from worker_node.node import Worker

pytestmark = NO_THREAD_FAILS

RAISED: dict[str, Callable[[], BaseException]] = {
    "MemoryError": MemoryError,
    "OutOfMemoryError": lambda: torch.OutOfMemoryError("CUDA out of memory"),
    "RuntimeError": lambda: RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    "OSError": lambda: OSError(errno.EIO, "Input/output error"),
    "FileNotFoundError": lambda: FileNotFoundError(errno.ENOENT, "No such file or directory", "layer-00000.experts"),
    "TimeoutError": TimeoutError,
    "KeyError": lambda: KeyError("w1"),
    "IndexError": IndexError,
    "ValueError": ValueError,
    "TypeError": TypeError,
    "AttributeError": AttributeError,
    "AssertionError": AssertionError,
    "ZeroDivisionError": ZeroDivisionError,
    "RecursionError": RecursionError,
    "NotImplementedError": NotImplementedError,
    "BufferError": BufferError,
    "EOFError": EOFError,
    "CorruptStoreError": lambda: CorruptStoreError("expert 3 fails its checksum"),
    "StoreError": lambda: StoreError("no such expert"),
    "ProtocolError": lambda: ProtocolError("wrong"),
    "DeadlineError": lambda: DeadlineError("too late"),
    "SystemExit": SystemExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
}
each_error = pytest.mark.parametrize("error", RAISED)
SLOTS = (1, 2)


class Once:
    """In place of a function: raises once, then does what it did before."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException) -> None:
        self._inner, self._error = getattr(owner, name), error
        self.raised = False
        patch.setattr(owner, name, self)

    def __call__(self, *args: Any, **named: Any) -> Any:
        if not self.raised:
            self.raised = True
            raise self._error
        return self._inner(*args, **named)


IN_A_LOAD: dict[str, Callable[[Worker], tuple[Any, str]]] = {
    "the slot": lambda worker: (worker.slots, "occupy"),
    "the pace, before": lambda worker: (worker.pace, "begin_load"),
    "the loader": lambda worker: (worker.loader, "load"),
    "the check": lambda worker: (load_checks, "compare"),
    "the pace, after": lambda worker: (worker.pace, "end_load"),
    "the cost of the check": lambda worker: (worker.checks, "on_loaded"),
}
IN_A_COMPUTATION: dict[str, Callable[[Worker], tuple[Any, str]]] = {
    "the pace, before": lambda worker: (worker.pace, "begin_compute"),
    "the rows": lambda worker: (ready, "received_tensor"),
    "the loader's stream": lambda worker: (worker.loader, "computing"),
    "the module": lambda worker: (worker._modules, "get"),
    "the products": lambda worker: (worker, "run"),
    "the pace, after": lambda worker: (worker.pace, "end_compute"),
    "the checksum": lambda worker: (session, "tensor_checksum"),
}


def is_whole(main: MainEnd, desk: WorkerDesk, expected: Expected, slots: int) -> None:
    """Every slot loads and computes, one after the other."""
    for slot in range(slots):
        main.loads_and_computes(50 + slot, desk.compute(60 + slot, slot, 1, slot), expected)


@pytest.mark.parametrize(("error", "where", "slots"), fast_cover(RAISED, IN_A_LOAD, SLOTS))
def test_a_load_that_fails_leaves_its_slot(
    desk: WorkerDesk, expected: Expected, monkeypatch: pytest.MonkeyPatch, where: str, slots: int, error: str
) -> None:
    worker = desk.worker(slots=slots)
    main = desk.welcome(worker)
    fault = Once(monkeypatch, *IN_A_LOAD[where](worker), RAISED[error]())
    main.send(Load(1, 0, 0, 3), desk.compute(2, 0, 0, 3))
    failure = main.failure(error, load_id=1)
    assert fault.raised
    assert failure.message.startswith(worker.name)
    main.send(Evict(0))
    is_whole(main, desk, expected, slots)
    assert main.nothing_came()


@pytest.mark.parametrize(
    ("error", "where", "slots", "evict"), fast_cover(RAISED, IN_A_COMPUTATION, SLOTS, (True, False))
)
def test_a_computation_that_fails_leaves_its_slot(
    desk: WorkerDesk,
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    evict: bool,
    slots: int,
    error: str,
) -> None:
    worker = desk.worker(slots=slots)
    main = desk.welcome(worker)
    main.send(Load(1, 0, 0, 3))
    assert isinstance(main.next(), Loaded)
    fault = Once(monkeypatch, *IN_A_COMPUTATION[where](worker), RAISED[error]())
    main.send(desk.compute(2, 0, 0, 3, evict=evict))
    failure = main.next()
    assert isinstance(failure, Failed)
    assert (failure.error, failure.call_id) == (error, 2)
    assert fault.raised
    monkeypatch.undo()
    main.send(Evict(0))
    is_whole(main, desk, expected, slots)
    assert main.nothing_came()


@each_error
def test_of_several_computations_only_the_failed_one_fails(
    desk: WorkerDesk, expected: Expected, held_arithmetic: HeldArithmetic, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    """They wait behind another and are computed together, which fails; then each by itself, of which one fails."""
    gate, worker = held_arithmetic.hold(0), desk.worker(slots=2, arithmetic=held_arithmetic)
    monkeypatch.setattr(worker, "is_rowwise", lambda *args: True)
    main = desk.welcome(worker)
    main.send(Load(1, 0, 0, 3), Load(2, 1, 1, 1))
    assert set(main.hear(2)) == {("Loaded", 1), ("Loaded", 2)}
    first = desk.compute(3, 0, 0, 3, evict=True)
    group = [desk.compute(4 + n, 1, 1, 1, evict=False) for n in range(3)]
    main.send(first)
    gate.wait_for_arrival()
    main.send(*group)
    compute = worker.compute_together

    def failing(messages: Any, form: str = "") -> Any:
        if any(message.call_id == 5 for message in messages):
            raise RAISED[error]()
        return compute(messages, form)

    monkeypatch.setattr(worker, "compute_together", failing)
    gate.open()
    answers = main.hear(4)
    failed = {key[1] for key in answers if key[0] == "Failed"}
    assert expected.fits(answers["Computed", 3], first)
    if issubclass(type(RAISED[error]()), Exception):
        assert failed == {5}
        assert all(expected.fits(answers["Computed", one.call_id], one) for one in (group[0], group[2]))
    else:  # the thread was to end: none of them is computed
        assert failed == {4, 5, 6}
    monkeypatch.undo()
    main.send(Evict(1))
    is_whole(main, desk, expected, 2)


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "SystemExit", "MemoryError"])
@pytest.mark.parametrize("where", ["the loader", "the products"])
def test_a_lent_thread_that_is_interrupted_leaves_the_slot(
    desk: WorkerDesk, expected: Expected, monkeypatch: pytest.MonkeyPatch, where: str, error: str
) -> None:
    """The main model's thread takes its interrupt with it."""
    lent = LentThreads()
    worker = desk.worker(slots=1, lent=lent)
    worker.loads_are_quick = True
    main = desk.welcome(worker)
    computing = where == "the products"
    Once(monkeypatch, *(IN_A_COMPUTATION if computing else IN_A_LOAD)[where](worker), RAISED[error]())
    interrupted: list[BaseException] = []

    def waiting() -> None:
        with lent.lend():
            ready.set()
            try:
                lent.run_until(over.is_set, WAIT_S)
            except BaseException as caught:  # noqa: BLE001
                interrupted.append(caught)

    ready, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=waiting)
    thread.start()
    assert ready.wait(WAIT_S)
    main.send(Load(1, 0, 0, 3), desk.compute(2, 0, 0, 3))
    heard = main.hear(1 + computing)
    over.set()
    lent.wake()
    thread.join(WAIT_S)
    assert heard["Failed", 2 if computing else 1].error == error
    assert [type(caught).__name__ for caught in interrupted] == ([] if error == "MemoryError" else [error])
    main.send(Evict(0))
    is_whole(main, desk, expected, 1)


def test_a_store_that_is_deleted_fails_loads_by_name_until_it_is_back(
    desk: WorkerDesk, own_store: ExpertStore, expected: Expected
) -> None:
    """A file that is open can still be read; it is opened anew after the first failure."""
    main = desk.welcome(desk.worker(slots=1, loader=DiskLoader(own_store)))
    path, _ = own_store.locate(0, 1)
    whole = path.read_bytes()
    path.write_bytes(b"")
    main.send(Load(1, 0, 0, 1))
    assert str(path) in main.failure("CorruptStoreError", load_id=1).message
    path.unlink()
    main.send(Evict(0), Load(2, 0, 0, 1))
    failure = main.failure("FileNotFoundError", load_id=2)
    for part in ("expert 1 of layer 0", str(path), "No such file"):
        assert part in failure.message
    path.write_bytes(whole)
    main.send(Evict(0))
    main.loads_and_computes(3, desk.compute(4, 0, 0, 1), expected)


def test_a_disk_that_cannot_be_read_is_named(desk: WorkerDesk, held_loader: HeldLoader, expected: Expected) -> None:
    main = desk.welcome(desk.worker(slots=1, loader=held_loader))
    held_loader.errors[0, 1] = OSError(errno.EIO, "Input/output error")
    main.send(Load(1, 0, 0, 1))
    failure = main.failure("OSError", load_id=1)
    for part in ("w0 cannot load expert 1 of layer 0", str(desk.store.locate(0, 1)[0]), "Input/output error"):
        assert part in failure.message
    main.send(Evict(0))
    main.loads_and_computes(2, desk.compute(3, 0, 0, 1), expected)


def test_an_output_that_cannot_be_sent_fails_and_the_others_are_sent(
    desk: WorkerDesk, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = desk.worker(slots=2)
    main = desk.welcome(worker)
    (served,) = worker.sessions._open
    send = served.reply.send

    def encoding(*messages: Any) -> None:
        if any(isinstance(message, Computed) and message.call_id == 3 for message in messages):
            raise ProtocolError("output.data is 70000000 bytes; allowed: at most 67108864 bytes; send it in parts")
        send(*messages)

    monkeypatch.setattr(served.reply, "send", encoding)
    main.send(Load(1, 0, 0, 3))
    assert isinstance(main.next(), Loaded)
    main.send(desk.compute(3, 0, 0, 3, evict=False))
    assert "send it in parts" in main.failure("ProtocolError", call_id=3).message
    other = desk.compute(4, 0, 0, 3)
    main.send(other)
    assert expected.fits(main.next(), other)
    is_whole(main, desk, expected, 2)
