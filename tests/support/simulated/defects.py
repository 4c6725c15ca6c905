"""Defects that are put back one at a time, to see that the simulated world finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from checkpoint.prefix_cache import PrefixCache
from main_node.admission import Admission
from main_node.engine.deadlines import Deadlines
from main_node.engine.engine import Engine
from main_node.engine.owed_answers import OwedAnswers
from main_node.steps import Steps
from scheduler.core.machine import Core
from wire.rpc.outbox import Outbox
from wire.rpc.stream import Stream
from worker_node.loaders.disk import DiskLoader
from worker_node.node import _Session as WorkerSession

Patch = tuple[Any, str, Any]


def _joins_begin_waits_anew(deadlines: Any, event: Any) -> None:
    deadlines._missing.discard(event.worker)
    deadlines._short_s = deadlines._stalled_s = 0.0


def _no_stall(deadlines: Any, passed_s: float) -> None:
    deadlines._note_progress()
    if deadlines.short:
        deadlines._short_s += passed_s
        if deadlines._short_s >= deadlines.worker_wait_s:
            deadlines._expire()


def _forgets_no_request(original: Callable[..., Any]) -> Callable[..., Any]:
    def close_request(engine: Any, number: int) -> None:
        request = engine._requests.get(number)
        original(engine, number)
        if request is not None and request.cancelled.is_set():
            engine._requests[number] = request

    return close_request


def _leaves_quietly(admission: Any, request: Any) -> None:
    with admission._changed:
        admission._open.discard(request)


def _keeps_cancelled_slots(original: Callable[..., Any]) -> Callable[..., Any]:
    def release(session: Any, occupancy: Any) -> None:
        if not occupancy.cancelled.is_set():
            original(session, occupancy)

    return release


def _overtakes(outbox: Any, messages: tuple[bytes, ...]) -> bool:
    if outbox._write is None or len(messages) > 1:
        return False
    outbox._write(messages[0])
    return True


def _counts_and_writes(outbox: Any, *messages: bytes, at_once: bool = True) -> bool:
    with outbox._counting:
        with outbox._writing:
            if outbox._write is not None and at_once and len(messages) == 1 and not outbox._count:
                outbox._write(messages[0])
                return True
        outbox._count += len(messages)
        outbox._bytes += sum(map(len, messages))
        for data in messages:
            outbox._queue.put(data)
    return True


def _writes_and_counts(outbox: Any) -> Iterator[bytes]:
    for data in iter(outbox._queue.get, None):
        with outbox._writing:
            yield data
            with outbox._counting:
                outbox._count -= 1
                outbox._bytes -= len(data)


def _backwards(original: Callable[..., Any]) -> Callable[..., Any]:
    def send(stream: Any, *messages: Any) -> None:
        original(stream, *reversed(messages))

    return send


def _reads_once(
    loader: Any, layer: int, expert: int, into: Any, cancelled: Any, form: str = "", digest: Any = None
) -> int:
    import worker_node.loaders.disk as disk

    path, blob = loader._store.locate(layer, expert, form)
    disk.os.preadv(loader._open(str(path)), [into.numpy().data[: blob.length]], blob.offset)
    if digest is not None:
        digest.add(into.numpy().data[: blob.length], more=False)
    return int(blob.length)


def _any_number_is_an_error(original: Callable[..., Any]) -> Callable[..., Any]:
    from scheduler.errors import ProtocolError

    def check(owed: Any, worker: int, number: int) -> None:
        raise ProtocolError(f"worker {worker} answered number {number}, which nobody has asked")

    return check


def _lengths_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    def keys(prefix: Any, prompt: Any) -> Iterator[Any]:
        return original(prefix, [0] * len(prompt))  # type: ignore[no-any-return]

    return keys


def _lost_in_order(original: Callable[..., Any]) -> Callable[..., Any]:
    """A worker that is lost gets its demands back before it is forgotten."""

    def forgive(owed: Any, worker: int) -> None:
        return None

    return forgive


def _drops_without_end(steps: Any, request: Any) -> None:
    with steps._changed:
        steps._open.discard(request)
        for job in [job for job in steps._ready if job.request is request]:
            steps._ready.remove(job)


def wrapped(owner: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    return owner, name, make(getattr(owner, name))


DEFECTS: dict[str, Callable[[], list[Patch]]] = {
    "A1: a call that kills its worker never ends": lambda: [
        (Core, "_shows_fault", lambda core, demand, lost: False),
        (Deadlines, "_on_worker_joined", _joins_begin_waits_anew),
        (Deadlines, "_check_workers", _no_stall),
    ],
    "A4: enormous outputs are taken": lambda: [
        ("main_node.engine.output_checks.is_usable", "", lambda output: True),
    ],
    "A5: a worker that never answers is waited for": lambda: [
        (OwedAnswers, "silent", lambda owed: []),
        (Deadlines, "_check_workers", _no_stall),
    ],
    "C5: an error without its cause": lambda: [(Deadlines, "_reason", lambda deadlines: "the request ended")],
    "damaged loads are computed with": lambda: [("worker_node.loaders.load_checks.compare", "", lambda *_: None)],
    "a short read is taken for a whole one": lambda: [(DiskLoader, "load", _reads_once)],
    "a cancelled load keeps its slot": lambda: [wrapped(WorkerSession, "_release", _keeps_cancelled_slots)],
    "a message overtakes those that wait": lambda: [(Outbox, "_put_at_once", _overtakes)],
    "two locks are taken in either order": lambda: [
        (Outbox, "put", _counts_and_writes),
        (Outbox, "__iter__", _writes_and_counts),
    ],
    "messages of one bundle are turned round": lambda: [wrapped(Stream, "send", _backwards)],
    "an idle stream does not beat": lambda: [(Stream, "_beat", lambda stream: None)],
    "nobody is told of a free place": lambda: [(Admission, "_leave", _leaves_quietly)],
    "a cancelled request is not forgotten": lambda: [wrapped(Engine, "close_request", _forgets_no_request)],
    "a late or repeated answer is an error": lambda: [wrapped(OwedAnswers, "_check_not_owed", _any_number_is_an_error)],
    "prompts are kept by their lengths": lambda: [wrapped(PrefixCache, "keys", _lengths_alone)],
    "a lost worker's debts are not forgiven": lambda: [wrapped(OwedAnswers, "forgive", _lost_in_order)],
    "a dropped pass is not ended": lambda: [(Steps, "drop", _drops_without_end)],
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Within the `with` block the product has this defect."""
    with ExitStack() as at_end:
        for owner, attribute, instead in DEFECTS[name]():
            patch = (
                mock.patch(owner, instead) if isinstance(owner, str) else mock.patch.object(owner, attribute, instead)
            )
            at_end.enter_context(patch)
        yield
