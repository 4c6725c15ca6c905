"""The worker: loads an expert just in time, computes it, evicts it. Two threads, so that a load never waits for a
computation nor a computation for another slot's load. With one slot there is nothing to overlap: a load needs the slot
that the computation before it leaves. Then one thread does both, and spares a hand-over an expert."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from checkpoint.expert import ExpertArithmetic
from checkpoint.store import ExpertStore
from checkpoint.tensors import tensor_bytes, tensor_from_bytes
from scheduler.emulation.clock import GivenUp
from scheduler.errors import ConfigError, LinkError, ODMoEError, ProtocolError
from scheduler.types import ExpertId
from wire.base import Channel
from wire.machine import host_name
from wire.messages import (
    PROTOCOL_VERSION,
    AskUsage,
    Compute,
    Computed,
    Evict,
    Failed,
    Load,
    Loaded,
    Message,
    Tensor,
    WorkerReady,
    WorkerUsage,
)
from wire.serial import SerialThread
from wire.sessions import Session, Sessions
from worker_node.loaders.base import Loader
from worker_node.measure import device_bytes, device_costs, device_name, load_bandwidth
from worker_node.restorer import Restorer
from worker_node.slots import Slots

SLOT_DEADLINE_S = 60.0
"""How long a load may wait for a computation to leave its slot."""

MAX_BOUND = 4096
"""So many modules on views of slots are kept, the last used: a few KiB each, and a cache of thousands of slots would
make one for every slot and layer."""


@dataclass(slots=True, eq=False)
class _Ticket:
    """One load, in `form`, and what is to be computed after it. `asked`, `ended`: when, as the loader's pace has it."""

    load_id: int
    slot: int
    expert: ExpertId
    asked: float
    form: str = ""
    ended: float = 0.0
    occupied: bool = False
    loaded: bool = False
    computing: bool = False
    given_up: GivenUp = field(default_factory=GivenUp)
    waiting: list[tuple[Compute, float]] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.expert.layer}.{self.expert.expert}"


class Worker:
    """One worker node; serves one main node at a time, the last that connected.

    `forms`: all that may be loaded; a slot has room for the largest of them. Where there is one beside the full form,
    which is empty, device memory for one restored expert is taken too.
    `load_bytes_per_s`: its loader's bandwidth, measured before it serves; the loads of that are counted nowhere.
    `costs`: seconds that a computation takes a call and a row, by a profile or measured; 0 where it was not.
    Raises ConfigError, StoreError for a form that the store lacks, or LaunchError where memory does not suffice or the
    store cannot be read.
    """

    def __init__(
        self,
        name: str,
        store: ExpertStore,
        arithmetic: ExpertArithmetic,
        loader: Loader,
        slots: int,
        forms: tuple[str, ...] = ("",),
    ) -> None:
        if not forms:
            raise ConfigError(f"{name} is given no form in which experts are loaded; the full one is ''")
        self.name = name
        self.store = store
        self.loader = loader
        self.pace = loader.pace
        self.forms = forms
        self.slots = Slots(slots, max(map(store.manifest.form_bytes, forms)), loader.device)
        smaller = tuple(form for form in forms if form)
        self._restorer = Restorer(store, arithmetic, smaller, loader.device) if smaller else None
        loader.prepare(self.slots.buffers)
        self.load_bytes_per_s = load_bandwidth(store, loader, self.slots.buffers, forms[0])
        self.freed = [0.0] * slots
        self.loads = 0
        self.bytes_loaded = 0
        self._arithmetic = arithmetic
        self._bound: dict[tuple[int, int], Callable[..., torch.Tensor]] = {}
        self.sessions: Sessions[_Session] = Sessions()
        self.costs = self.pace.costs or device_costs(
            store, partial(self.run, 0, store.manifest.moe_layers[0], forms[0])
        )

    @property
    def allocated_bytes(self) -> int:
        """Device memory that it holds: its slots, and what restoring takes."""
        return self.slots.allocated_bytes + (self._restorer.allocated_bytes if self._restorer else 0)

    def accept(self, reply: Channel) -> _Session:
        return self.sessions.add(_Session(self, reply))

    def compute(self, message: Compute, form: str = "") -> torch.Tensor:
        """The expert in the message's slot, where its `form` is, on the message's rows; the output is on the CPU."""
        hidden = tensor_from_bytes(message.hidden.dtype, message.hidden.shape, message.hidden.data)
        weights = tensor_from_bytes(message.weights.dtype, message.weights.shape, message.weights.data)
        return self.run(message.slot, message.layer, form, hidden, weights)

    def run(self, slot: int, layer: int, form: str, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`hidden` [n, H] and `weights` [n] through the expert of `layer` in `slot`; [n, H] on the CPU."""
        buffer = self.slots.buffers[slot]
        with self.loader.computing(buffer):  # all of it on the stream that waits for the load
            hidden, weights = hidden.to(buffer.device), weights.to(buffer.device)
            if form and self._restorer:
                return self._restorer.compute(buffer, layer, form, hidden, weights)
            bound = self._bound.pop((slot, layer), None)
            if bound is None:
                bound = self._arithmetic.bind(layer, self.store.views(buffer, layer))
            self._bound[slot, layer] = bound  # the last used stand last
            if len(self._bound) > MAX_BOUND:
                self._bound.pop(next(iter(self._bound)), None)
            return bound(hidden, weights).cpu()

    def share(self, expert: ExpertId, form: str) -> float:
        """Of an expert's bytes, those that its form has."""
        if not form:
            return 1.0
        return self.store.locate(*expert, form)[1].length / self.store.locate(*expert)[1].length

    def close(self) -> None:
        self.sessions.close()
        self.loader.close()


class _Session(Session):
    """One main node's stream to this worker."""

    def __init__(self, worker: Worker, reply: Channel) -> None:
        manifest = worker.store.manifest
        belongs = manifest.fingerprint, manifest.dtype
        super().__init__(worker.name, belongs, worker.sessions, reply, worker.pace.now)
        self._worker = worker
        self._tickets: dict[int, _Ticket] = {}
        self._slots = threading.Lock()
        self._loading = SerialThread(f"{worker.name}-load", self.report)
        one = len(worker.slots.buffers) == 1
        self._computing = self._loading if one else SerialThread(f"{worker.name}-compute", self.report)

    # --- messages -----------------------------------------------------------------------------------------------

    def ready(self) -> WorkerReady:
        worker, device = self._worker, self._worker.loader.device
        slots = worker.slots.buffers
        return WorkerReady(
            version=PROTOCOL_VERSION,
            node=self.name,
            slots=len(slots),
            slot_bytes=slots[0].nbytes,
            device=device,
            loader=worker.loader.name,
            host=host_name(),
            pid=os.getpid(),
            device_name=device_name(device),
            device_bytes=device_bytes(device),
            load_bytes_per_s=worker.load_bytes_per_s,
            call_s=worker.costs[0],
            row_s=worker.costs[1],
        )

    def dispatch(self, message: Message) -> None:
        if isinstance(message, Load):
            self._load(message)
        elif isinstance(message, Evict):
            self._evict(message.slot)
        elif isinstance(message, Compute):
            self.spans.came(message)
            self._compute(message)
        elif isinstance(message, AskUsage):
            self._loading.submit(self._usage)
        else:
            raise ProtocolError(f"a worker does not take {type(message).__name__}")

    def end(self) -> None:
        with self._slots:
            tickets = list(self._tickets)
        for slot in tickets:
            self._evict(slot)
        self._loading.close()
        self._computing.close()

    def _load(self, message: Load) -> None:
        if not 0 <= message.slot < len(self._worker.slots.buffers):
            raise ProtocolError(f"slot {message.slot} does not exist; {self._worker.name} has slots 0 to "
                                f"{len(self._worker.slots.buffers) - 1}")  # fmt: skip
        if message.form not in self._worker.forms:
            raise ProtocolError(f"{self._worker.name} does not load experts in form {message.form!r:.40}; it was "
                                f"started for {', '.join(map(repr, self._worker.forms))}")  # fmt: skip
        self._worker.store.locate(message.layer, message.expert, message.form)
        expert, asked = ExpertId(message.layer, message.expert), self._worker.pace.now()
        ticket = _Ticket(message.load_id, message.slot, expert, asked, message.form)
        with self._slots:
            if self.over:  # `end` has looked already for what is to be given up
                return
            if message.slot in self._tickets:
                raise ProtocolError(f"slot {message.slot} is taken by {self._tickets[message.slot].expert}")
            self._tickets[message.slot] = ticket
        self._loading.submit(self._run_load, ticket)

    def _compute(self, message: Compute) -> None:
        asked = self._worker.pace.now()
        with self._slots:
            ticket = self._tickets.get(message.slot)
            if ticket is None or ticket.expert != (message.layer, message.expert):
                held = ticket.expert if ticket else "nothing"
                raise ProtocolError(
                    f"slot {message.slot} holds {held}, not expert {message.expert} of layer {message.layer}"
                )
            if ticket.loaded:
                self._computing.submit(self._run_compute, ticket, message, asked)
            else:
                ticket.waiting.append((message, asked))

    def _evict(self, slot: int) -> None:
        with self._slots:
            ticket = self._tickets.pop(slot, None)
            if ticket is None:
                return
            ticket.given_up.give_up(self._worker.pace.now())
            free = ticket.occupied and ticket.loaded and not ticket.computing
            ticket.occupied = ticket.occupied and not free
        if free:
            self._free(ticket)

    def _usage(self) -> None:
        worker = self._worker
        slots = worker.slots
        self.reply.send(WorkerUsage(slots.resident_max, worker.allocated_bytes, worker.loads, worker.bytes_loaded))

    # --- the threads --------------------------------------------------------------------------------------------

    def _run_load(self, ticket: _Ticket) -> None:
        """On the loading thread."""
        if ticket.given_up.is_set():
            return
        worker = self._worker
        try:
            buffer = worker.slots.occupy(ticket.slot, ticket.expert, SLOT_DEADLINE_S)
            ticket.occupied = True
            start = worker.pace.begin_load(max(ticket.asked, worker.freed[ticket.slot]))
            moved = worker.loader.load(*ticket.expert, buffer, ticket.given_up.is_set, ticket.form)
            ticket.ended = worker.pace.end_load(ticket.given_up, worker.share(ticket.expert, ticket.form))
        except (OSError, ODMoEError, RuntimeError, ValueError) as error:
            self._release(ticket)
            self._send(Failed(type(error).__name__, f"{worker.name}: {error}", load_id=ticket.load_id))
            return
        given_up = ticket.given_up.is_set()
        self.spans.add("given up" if given_up else "load", ticket.label, start, ticket.ended)
        if not given_up:
            worker.loads += 1
            worker.bytes_loaded += moved
            # before anything computed from it can be sent
            self._send(Loaded(ticket.load_id, moved, ticket.ended - start))
        with self._slots:
            ticket.loaded = True
            given_up = ticket.given_up.is_set()
            for message, asked in ticket.waiting:  # submitted under the lock: what comes next must stay behind
                self._computing.submit(self._run_compute, ticket, message, asked)
            ticket.waiting = []
        if given_up:
            self._release(ticket)

    def _run_compute(self, ticket: _Ticket, message: Compute, asked: float) -> None:
        """On the computing thread."""
        with self._slots:
            if ticket.given_up.is_set():
                return
            ticket.computing = True
        pace = self._worker.pace
        start = pace.begin_compute(max(asked, ticket.ended))
        try:
            output = self._worker.compute(message, ticket.form)
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            self._finish(ticket, evict=False)
            self._send(Failed(type(error).__name__, f"{self._worker.name}: {error}", call_id=message.call_id))
            return
        end = pace.end_compute(len(output))
        self.spans.add("compute", ticket.label, start, end)
        self._finish(ticket, message.evict)
        answer = Computed(message.call_id, Tensor(*tensor_bytes(output)), end - start)
        self.spans.sent(answer)
        self._send(answer)

    def _finish(self, ticket: _Ticket, evict: bool) -> None:
        """The computation has left the slot; free it if it is to be evicted or was meanwhile."""
        with self._slots:
            ticket.computing = False
            if evict and self._tickets.get(ticket.slot) is ticket:
                del self._tickets[ticket.slot]
                ticket.given_up.give_up(self._worker.pace.now())
        if ticket.given_up.is_set():
            self._release(ticket)

    def _release(self, ticket: _Ticket) -> None:
        with self._slots:
            held, ticket.occupied = ticket.occupied, False
        if held:
            self._free(ticket)

    def _free(self, ticket: _Ticket) -> None:
        now = self._worker.freed[ticket.slot] = self._worker.pace.now()
        self.spans.add("evict", ticket.label, now, now)
        self._worker.slots.release(ticket.slot)

    def _send(self, message: Message) -> None:
        """Where the stream has just broken, `end` is about to hear of it: the slot's books come first."""
        if not self.over:
            with contextlib.suppress(LinkError):
                self.reply.send(message)

    def report(self, error: Exception, about: Message | None = None) -> None:
        load_id = about.load_id if isinstance(about, Load) else 0
        call_id = about.call_id if isinstance(about, Compute) else 0
        self._send(Failed(type(error).__name__, f"{self.name}: {error}", load_id, call_id))
