"""Carries out what the scheduler decides: commands go to workers and shadow, what they answer becomes events."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from checkpoint.tensors import tensor_bytes
from main_node.peers import PeerHandler, read_output
from main_node.sequence import align_messages
from scheduler import types as t
from scheduler.core import Core
from scheduler.errors import ClusterError, DeadlineError, LinkError, ODMoEError, ProtocolError, RequestFailedError
from wire import messages as w
from wire.base import Channel, Handler

Connect = Callable[[Handler], Channel]
_log = logging.getLogger(__name__)


class RequestData(Protocol):
    """What the engine must fetch of a request when the scheduler says so."""

    def prompt_before(self, step: int) -> tuple[int, ...]:
        """Every token that comes before decode pass `step`'s."""

    def token_of(self, step: int) -> int:
        """The token that decode pass `step` reads."""

    def kv_rows(self, start: int, stop: int) -> list[torch.Tensor]:
        """Keys and values of every cache layer, positions [start, stop)."""

    @property
    def max_new_tokens(self) -> int: ...


@dataclass(slots=True)
class _Layer:
    """A visit under way: each named expert's rows, and its outputs as they come."""

    hidden: dict[int, torch.Tensor]
    weights: dict[int, torch.Tensor]
    outputs: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class _Owed:
    """What a worker was asked and has not answered. `since`: when it was asked, or last answered what it owed."""

    command: t.Load | t.Compute
    since: float


class Engine:
    """Thread-safe: events may be posted from any thread; one at a time reaches the scheduler.

    `answer_s`: a worker that owes answers and has given none for so long counts as lost.
    """

    def __init__(self, core: Core, hello: w.Hello, answer_s: float = 30.0, lookahead: int = 2) -> None:
        self.core = core
        self.answer_s = answer_s
        self.lookahead = lookahead
        self.workers: dict[int, PeerHandler] = {}
        self.shadow: PeerHandler | None = None
        self._hello = hello
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._inbox: list[t.Event] = []
        self._draining = False
        self._requests: dict[int, RequestData] = {}
        self._layers: dict[t.Visit, _Layer] = {}
        self._owed: dict[int, _Owed] = {}
        self._failed: dict[int, str] = {}
        self.lost: list[str] = []

    # --- peers --------------------------------------------------------------------------------------------------

    def add_worker(self, number: int, connect: Connect, deadline_s: float) -> w.WorkerReady:
        """Open a stream to a worker and wait until it is ready. Raises ClusterError."""
        peer = PeerHandler(
            f"worker {number}",
            lambda m: self._from_worker(number, peer, m),
            lambda error: self._lost(number, peer, error),
        )
        ready = peer.open(connect, self._hello, deadline_s)
        if not isinstance(ready, w.WorkerReady) or ready.slots < 1:
            peer.close()
            raise ClusterError(f"worker {number} answered {ready}; is that the address of a worker, with a slot?")
        before = self.workers.get(number)
        if before is not None:
            self._lost(number, before, ClusterError(f"another worker {number} came"))
        with self._lock:
            self.workers[number] = peer
            self.post(t.WorkerJoined(number, ready.slots))
        return ready

    def add_shadow(self, connect: Connect, deadline_s: float) -> w.ShadowReady:
        """Open a stream to the shadow and wait until it is ready. Raises ClusterError."""
        peer = PeerHandler("shadow", lambda m: self._from_shadow(peer, m), lambda error: self._shadow_lost(peer, error))
        ready = peer.open(connect, self._hello, deadline_s)
        if not isinstance(ready, w.ShadowReady):
            peer.close()
            raise ClusterError(f"the shadow answered {type(ready).__name__}; is that the address of a shadow?")
        before = self.shadow
        if before is not None:
            self._shadow_lost(before, ClusterError("another shadow came"))
        with self._lock:
            self.shadow = peer
            self.post(t.ShadowJoined())
        return ready

    def _from_worker(self, number: int, peer: PeerHandler, message: w.Message) -> None:
        try:
            with self._lock:
                if isinstance(message, w.Computed):
                    call = self._settle(number, message.call_id, t.Compute)
                    if isinstance(call, t.Compute):
                        self._keep_output(call, message)
                        self.post(t.ComputeEnded(message.call_id))
                elif isinstance(message, w.Loaded):
                    self._settle(number, message.load_id, t.Load)
                    self.post(t.LoadEnded(message.load_id, message.nbytes))
                elif not isinstance(message, w.Failed):
                    raise ProtocolError(f"worker {number} sent {type(message).__name__}, which no worker says")
                elif message.load_id:
                    self._settle(number, message.load_id, t.Load)
                    self.post(t.LoadFailed(message.load_id, f"{message.error}: {message.message}"))
                elif message.call_id:
                    self._settle(number, message.call_id, t.Compute)
                    self.post(t.ComputeFailed(message.call_id, f"{message.error}: {message.message}"))
                else:
                    raise ClusterError(f"{message.error}: {message.message}")
        except ClusterError as error:
            self._lost(number, peer, error)

    def _settle(self, number: int, asked: int, kind: type) -> t.Load | t.Compute | None:
        """Take a load or call off what its worker owes. None: it is not wanted any more. Raises ProtocolError."""
        owed = self._owed.get(asked)
        if owed is None:
            return None
        if owed.command.worker != number or not isinstance(owed.command, kind):
            raise ProtocolError(f"worker {number} answered number {asked}, which is {owed.command}")
        del self._owed[asked]
        for other in self._owed.values():
            if other.command.worker == number:
                other.since = time.monotonic()
        return owed.command

    def _keep_output(self, call: t.Compute, message: w.Computed) -> None:
        layer = self._layers.get(call.visit)
        if layer is not None:
            expert, rows = call.expert.expert, slice(call.start, call.stop)
            output = read_output(message.output, layer.hidden[expert][rows], layer.weights[expert])
            layer.outputs.setdefault(expert, {})[call.start] = output

    def _from_shadow(self, peer: PeerHandler, message: w.Message) -> None:
        shape = self.core.shape
        if isinstance(message, w.Failed):
            self._shadow_lost(peer, ClusterError(f"{message.error}: {message.message}"))
        elif not isinstance(message, w.Prediction):
            self._shadow_lost(peer, ProtocolError(f"it sent {type(message).__name__}, which no shadow says"))
        elif message.layer not in shape.layers or not all(0 <= e < shape.experts for e in message.experts):
            named = f"experts {message.experts} of layer {message.layer}"
            self._shadow_lost(peer, ProtocolError(f"it predicts {named}, which the model does not have"))
        else:
            self.post(t.Predicted(message.request, message.position, message.layer, message.experts))

    def _lost(self, number: int, peer: PeerHandler, error: ODMoEError | None) -> None:
        with self._lock:
            if self.workers.get(number) is not peer:
                return
            del self.workers[number]
            _log.warning("worker %d is lost: %s", number, error or "it closed its stream")
            self.lost.append(f"worker {number}")
            self._owed = {k: owed for k, owed in self._owed.items() if owed.command.worker != number}
            self.post(t.WorkerLost(number, str(error or "it closed its stream")))
        peer.close()

    def _shadow_lost(self, peer: PeerHandler, error: ODMoEError | None) -> None:
        with self._lock:
            if self.shadow is not peer:
                return
            self.shadow = None
            self.lost.append("shadow")
            _log.warning("the shadow is lost, going on without predictions: %s", error or "it closed its stream")
            self.post(t.ShadowLost())
        peer.close()

    # --- events in, commands out --------------------------------------------------------------------------------

    def post(self, event: t.Event) -> None:
        """Hand a fact to the scheduler and carry out what follows. An event posted on the way is taken afterwards."""
        with self._lock:
            self._inbox.append(event)
            if self._draining:
                return
            self._draining = True
            try:
                while self._inbox:
                    for command in self.core.handle(self._inbox.pop(0), time.monotonic()):
                        self._act(command)
            finally:
                self._draining = False
                self._changed.notify_all()

    def _act(self, command: t.Command) -> None:
        if isinstance(command, t.Compute):
            self._send_compute(command)
        elif isinstance(command, t.Load):
            self._ask(command.load_id, command, w.Load(command.load_id, command.slot, *command.expert))
        elif isinstance(command, t.Evict):  # what was asked of the slot is not answered any more
            place = (command.worker, command.slot)
            self._owed = {k: o for k, o in self._owed.items() if (o.command.worker, o.command.slot) != place}
            self._tell(command.worker, w.Evict(command.slot))
        elif isinstance(command, t.Resume):
            if command.visit in self._layers:
                self._layers[command.visit].done.set()
        elif isinstance(command, t.Fail):
            self._failed[command.request] = command.reason
            for visit, layer in self._layers.items():
                if visit.request == command.request:
                    layer.done.set()
        else:
            self._act_on_shadow(command)

    def _act_on_shadow(self, command: t.Follow | t.Align | t.Unfollow) -> None:
        shadow = self.shadow
        if shadow is None:
            return
        try:
            for message in self._shadow_messages(command):
                shadow.send(message)
        except ClusterError as error:
            self._shadow_lost(shadow, error)

    def _shadow_messages(self, command: t.Follow | t.Align | t.Unfollow) -> list[w.Message]:
        if isinstance(command, t.Unfollow):
            return [w.CloseRequest(command.request)]
        data = self._requests[command.request]
        if isinstance(command, t.Follow):
            policy = self.core.alignment
            prompt = data.prompt_before(command.step)
            return [
                w.OpenRequest(
                    command.request, prompt, command.step, data.max_new_tokens,
                    policy.token_period, policy.kv_period, self.lookahead,
                )
            ]  # fmt: skip
        token = data.token_of(command.step) if command.token else None
        return align_messages(command, token, data.kv_rows(command.kv_start, command.kv_stop))

    def _send_compute(self, command: t.Compute) -> None:
        layer = self._layers.get(command.visit)
        if layer is None:  # interrupted: its request is about to be closed
            return
        rows = slice(command.start, command.stop)
        expert = command.expert.expert
        message = w.Compute(
            command.call_id, command.slot, *command.expert,
            w.Tensor(*tensor_bytes(layer.hidden[expert][rows])),
            w.Tensor(*tensor_bytes(layer.weights[expert][rows])),
            command.evict,
        )  # fmt: skip
        try:
            self._ask(command.call_id, command, message)
        except ProtocolError as error:  # too large for a message
            self.post(t.ComputeFailed(command.call_id, str(error)))

    def _ask(self, asked: int, command: t.Load | t.Compute, message: w.Message) -> None:
        if command.worker in self.workers:
            self._owed[asked] = _Owed(command, time.monotonic())
            self._tell(command.worker, message)

    def _tell(self, number: int, message: w.Message) -> None:
        peer = self.workers.get(number)
        if peer is None:
            return
        try:
            peer.send(message)
        except LinkError as error:
            self._lost(number, peer, error)

    # --- the main model's side ----------------------------------------------------------------------------------

    def open_request(self, number: int, data: RequestData, prompt_tokens: int) -> None:
        with self._lock:
            self._requests[number] = data
            self.post(t.RequestOpened(number, prompt_tokens))

    def close_request(self, number: int) -> None:
        with self._lock:
            self.post(t.RequestClosed(number))
            self._requests.pop(number, None)
            self._failed.pop(number, None)
            self.core.ledgers.pop(number, None)
            for visit, layer in self._layers.items():
                if visit.request == number:
                    layer.done.set()

    def experts(self, visit: t.Visit, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """One MoE layer, computed by the workers: hidden [T, H], index and weights [T, k] -> [T, H].

        Rows are gathered and outputs added in the order of the family's eager forward, so that the result is the
        same to the last bit (unless mini-batches split an expert's rows). Raises RequestFailedError.
        """
        by_choice = index.T  # [k, T]
        named = torch.unique(index).tolist()
        tokens: dict[int, torch.Tensor] = {}
        layer = _Layer({}, {})
        for expert in named:
            place, token = torch.where(by_choice == expert)
            tokens[expert] = token
            layer.hidden[expert] = hidden[token]
            layer.weights[expert] = weights[token, place]
        with self._lock:
            if visit.request not in self._requests:
                raise RequestFailedError(f"request {visit.request} was closed")
            self._layers[visit] = layer
            self.post(t.GateFired(visit, tuple((expert, len(tokens[expert])) for expert in named)))
        try:
            self._wait(visit, layer)
        finally:
            with self._lock:
                del self._layers[visit]
        result = torch.zeros_like(hidden)
        for expert in named:
            parts = layer.outputs[expert]
            output = torch.cat([parts[start] for start in sorted(parts)]) if len(parts) > 1 else parts[0]
            result.index_add_(0, tokens[expert], output.to(hidden))
        return result

    def _wait(self, visit: t.Visit, layer: _Layer) -> None:
        wait_s = self.answer_s
        while visit.request not in self._failed and not layer.done.wait(wait_s):
            wait_s = self._drop_silent()
        reason = self._failed.get(visit.request)
        if reason is not None:
            raise RequestFailedError(f"request {visit.request} failed: {reason}")
        if visit.request not in self._requests:
            raise RequestFailedError(f"request {visit.request} was closed")

    def _drop_silent(self) -> float:
        """Workers that owe answers and have given none for `answer_s` count as lost. Seconds until the next might."""
        with self._lock:
            silent = {o.command.worker for o in self._owed.values() if self._left_s(o) <= 0}
            peers = {number: self.workers[number] for number in silent}
        for number, peer in peers.items():
            error = DeadlineError(f"worker {number} has not answered for {self.answer_s:g} s")
            self._lost(number, peer, error)
        with self._lock:
            return max(0.01, min(map(self._left_s, self._owed.values()), default=self.answer_s))

    def _left_s(self, owed: _Owed) -> float:
        return owed.since + self.answer_s - time.monotonic()

    def wait_for_predictions(self, number: int, deadline_s: float) -> bool:
        """Until every layer that the main model has routed was predicted too. False when that took too long."""
        ledger = self.core.ledgers[number]
        with self._changed:
            return self._changed.wait_for(lambda: self.shadow is None or ledger.unmatched == 0, deadline_s)

    def usage(self, deadline_s: float = 10.0) -> tuple[dict[int, w.WorkerUsage], w.ShadowUsage | None]:
        """What every node holds, asked of all at once. A node that does not answer in time is left out."""
        with self._lock:
            peers, shadow = sorted(self.workers.items()), self.shadow
        end = time.monotonic() + deadline_s
        for peer in [*(peer for _, peer in peers), *([shadow] if shadow else [])]:
            peer.put(w.AskUsage())
        workers: dict[int, w.WorkerUsage] = {}
        for number, peer in peers:
            answer = peer.take(w.WorkerUsage, end - time.monotonic())
            if isinstance(answer, w.WorkerUsage):
                workers[number] = answer
        held = shadow.take(w.ShadowUsage, end - time.monotonic()) if shadow else None
        return workers, held if isinstance(held, w.ShadowUsage) else None

    def close(self) -> None:
        """End every stream. A request that still waits for a worker fails."""
        with self._lock:
            workers, self.workers = self.workers, {}
            shadow, self.shadow = self.shadow, None
            self._owed.clear()
            for number in workers:
                self.post(t.WorkerLost(number, "the main node was closed"))
        for peer in [*workers.values(), *([shadow] if shadow else [])]:
            peer.close()
