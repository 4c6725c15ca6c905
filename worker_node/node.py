"""The worker: loads an expert just in time, computes it, evicts it. Two threads, so that a load never waits for a
computation nor a computation for another slot's load."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from checkpoint.single import ExpertArithmetic
from checkpoint.store import ExpertStore
from checkpoint.tensors import tensor_bytes, tensor_from_bytes
from scheduler.errors import LinkError, ODMoEError, ProtocolError
from scheduler.types import ExpertId
from wire.base import Channel
from wire.handshake import check_hello
from wire.messages import (
    PROTOCOL_VERSION,
    AskUsage,
    Compute,
    Computed,
    Evict,
    Failed,
    Hello,
    Load,
    Loaded,
    Message,
    Tensor,
    WorkerReady,
    WorkerUsage,
)
from wire.serial import SerialThread
from wire.sessions import Sessions
from worker_node.loaders import Loader
from worker_node.slots import Slots

SLOT_DEADLINE_S = 60.0
"""How long a load may wait for a computation to leave its slot."""


@dataclass(slots=True, eq=False)
class _Ticket:
    """One load and what is to be computed after it."""

    load_id: int
    slot: int
    expert: ExpertId
    occupied: bool = False
    loaded: bool = False
    given_up: bool = False
    computing: bool = False
    waiting: list[Compute] = field(default_factory=list)


class Worker:
    """One worker node; serves one main node at a time, the last that connected."""

    def __init__(self, name: str, store: ExpertStore, arithmetic: ExpertArithmetic, loader: Loader, slots: int) -> None:
        self.name = name
        self.store = store
        self.loader = loader
        self.slots = Slots(slots, store.manifest.blob_bytes)
        self.loads = 0
        self.bytes_loaded = 0
        self._arithmetic = arithmetic
        self._bound: dict[tuple[int, int], Callable[..., torch.Tensor]] = {}
        self.sessions: Sessions[_Session] = Sessions()

    def accept(self, reply: Channel) -> _Session:
        return self.sessions.add(_Session(self, reply))

    def compute(self, message: Compute) -> torch.Tensor:
        """The expert in the message's slot on the message's rows."""
        key = (message.slot, message.layer)
        if key not in self._bound:
            views = self.store.views(self.slots.buffers[message.slot], message.layer)
            self._bound[key] = self._arithmetic.bind(message.layer, views)
        hidden = tensor_from_bytes(message.hidden.dtype, message.hidden.shape, message.hidden.data)
        weights = tensor_from_bytes(message.weights.dtype, message.weights.shape, message.weights.data)
        return self._bound[key](hidden, weights)

    def close(self) -> None:
        self.sessions.close()
        self.loader.close()


class _Session:
    """One main node's stream to this worker."""

    def __init__(self, worker: Worker, reply: Channel) -> None:
        self._worker = worker
        self._reply = reply
        self._tickets: dict[int, _Ticket] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._welcome = False
        self._loading = SerialThread(f"{worker.name}-load", self._report)
        self._computing = SerialThread(f"{worker.name}-compute", self._report)

    # --- messages -----------------------------------------------------------------------------------------------

    def on_message(self, message: Message) -> None:
        try:
            if isinstance(message, Hello):
                self._hello(message)
            elif not self._welcome:
                raise ProtocolError(f"{type(message).__name__} came before Hello; a stream begins with Hello")
            elif isinstance(message, Load):
                self._load(message)
            elif isinstance(message, Evict):
                self._evict(message.slot)
            elif isinstance(message, Compute):
                self._compute(message)
            elif isinstance(message, AskUsage):
                self._loading.submit(self._usage)
            else:
                raise ProtocolError(f"a worker does not take {type(message).__name__}")
        except ODMoEError as error:
            self._report(error, message)

    def on_close(self, error: ODMoEError | None) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            tickets = list(self._tickets)
        self._worker.sessions.forget(self)
        for slot in tickets:
            self._evict(slot)
        self._loading.close()
        self._computing.close()

    def replaced(self) -> None:
        """Another main node has connected: tell this one, and forget it."""
        with contextlib.suppress(LinkError):
            self._send(Failed("LinkError", f"{self._worker.name} now serves another main node"))
        self.on_close(None)
        self._reply.close()

    def _hello(self, hello: Hello) -> None:
        worker, manifest = self._worker, self._worker.store.manifest
        check_hello(hello, worker.name, manifest.fingerprint, manifest.dtype)
        worker.sessions.serve(self)
        self._welcome = True
        slot_bytes = worker.slots.buffers[0].nbytes
        self._reply.send(
            WorkerReady(PROTOCOL_VERSION, worker.name, len(worker.slots.buffers), slot_bytes, "cpu", worker.loader.name)
        )

    def _load(self, message: Load) -> None:
        if not 0 <= message.slot < len(self._worker.slots.buffers):
            raise ProtocolError(f"slot {message.slot} does not exist; {self._worker.name} has slots 0 to "
                                f"{len(self._worker.slots.buffers) - 1}")  # fmt: skip
        self._worker.store.locate(message.layer, message.expert)
        ticket = _Ticket(message.load_id, message.slot, ExpertId(message.layer, message.expert))
        with self._lock:
            if message.slot in self._tickets:
                raise ProtocolError(f"slot {message.slot} is taken by {self._tickets[message.slot].expert}")
            self._tickets[message.slot] = ticket
        self._loading.submit(self._run_load, ticket)

    def _compute(self, message: Compute) -> None:
        with self._lock:
            ticket = self._tickets.get(message.slot)
            if ticket is None or ticket.expert != (message.layer, message.expert):
                held = ticket.expert if ticket else "nothing"
                raise ProtocolError(
                    f"slot {message.slot} holds {held}, not expert {message.expert} of layer {message.layer}"
                )
            if ticket.loaded:
                self._computing.submit(self._run_compute, ticket, message)
            else:
                ticket.waiting.append(message)

    def _evict(self, slot: int) -> None:
        with self._lock:
            ticket = self._tickets.pop(slot, None)
            if ticket is None:
                return
            ticket.given_up = True
            free = ticket.occupied and ticket.loaded and not ticket.computing
            ticket.occupied = ticket.occupied and not free
        if free:
            self._worker.slots.release(slot)

    def _usage(self) -> None:
        worker = self._worker
        slots = worker.slots
        self._reply.send(WorkerUsage(slots.resident_max, slots.allocated_bytes, worker.loads, worker.bytes_loaded))

    # --- the two threads ----------------------------------------------------------------------------------------

    def _run_load(self, ticket: _Ticket) -> None:
        """On the loading thread."""
        if ticket.given_up:
            return
        worker = self._worker
        try:
            buffer = worker.slots.occupy(ticket.slot, ticket.expert, SLOT_DEADLINE_S)
            ticket.occupied = True
            start = time.perf_counter()
            moved = worker.loader.load(*ticket.expert, buffer, lambda: ticket.given_up)
        except (OSError, ODMoEError, RuntimeError, ValueError) as error:
            self._release(ticket)
            self._send(Failed(type(error).__name__, f"{worker.name}: {error}", load_id=ticket.load_id))
            return
        seconds = time.perf_counter() - start
        if not ticket.given_up:
            worker.loads += 1
            worker.bytes_loaded += moved
            self._send(Loaded(ticket.load_id, moved, seconds))  # before anything computed from it can be sent
        with self._lock:
            ticket.loaded = True
            given_up = ticket.given_up
            for message in ticket.waiting:  # submitted under the lock: what comes next must stay behind
                self._computing.submit(self._run_compute, ticket, message)
            ticket.waiting = []
        if given_up:
            self._release(ticket)

    def _run_compute(self, ticket: _Ticket, message: Compute) -> None:
        """On the computing thread."""
        with self._lock:
            if ticket.given_up:
                return
            ticket.computing = True
        start = time.perf_counter()
        try:
            output = self._worker.compute(message)
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            self._finish(ticket, evict=False)
            self._send(Failed(type(error).__name__, f"{self._worker.name}: {error}", call_id=message.call_id))
            return
        seconds = time.perf_counter() - start
        self._finish(ticket, message.evict)
        self._send(Computed(message.call_id, Tensor(*tensor_bytes(output)), seconds))

    def _finish(self, ticket: _Ticket, evict: bool) -> None:
        """The computation has left the slot; free it if it is to be evicted or was meanwhile."""
        with self._lock:
            ticket.computing = False
            if evict and self._tickets.get(ticket.slot) is ticket:
                del self._tickets[ticket.slot]
                ticket.given_up = True
        if ticket.given_up:
            self._release(ticket)

    def _release(self, ticket: _Ticket) -> None:
        with self._lock:
            held, ticket.occupied = ticket.occupied, False
        if held:
            self._worker.slots.release(ticket.slot)

    def _send(self, message: Message) -> None:
        if not self._closed:
            self._reply.send(message)

    def _report(self, error: Exception, about: Message | None = None) -> None:
        if self._closed:
            return
        load_id = about.load_id if isinstance(about, Load) else 0
        call_id = about.call_id if isinstance(about, Compute) else 0
        self._reply.send(Failed(type(error).__name__, f"{self._worker.name}: {error}", load_id, call_id))
