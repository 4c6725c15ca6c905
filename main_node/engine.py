"""Carries out what the scheduler decides: commands go to workers and shadow, what they answer becomes events."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from checkpoint.tensors import tensor_bytes, tensor_from_bytes
from main_node.peers import PeerHandler
from scheduler import types as t
from scheduler.core import Core
from scheduler.errors import ClusterError, DeadlineError, LinkError, ODMoEError, RequestFailedError
from wire import messages as w
from wire.base import Channel, Handler

ALIGN_PART_BYTES = 4 << 20
"""KV rows travel in parts of about this size: large messages are slow to encode and would hold up what follows."""

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


class Engine:
    """Thread-safe: events may be posted from any thread; one at a time reaches the scheduler.

    `answer_s`: a worker that owes an answer and has said nothing for so long counts as lost.
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
        self._calls: dict[int, tuple[int, t.Compute]] = {}
        self._loads: dict[int, int] = {}
        self._failed: dict[int, str] = {}

    # --- peers --------------------------------------------------------------------------------------------------

    def add_worker(self, number: int, connect: Connect, deadline_s: float) -> w.WorkerReady:
        """Open a stream to a worker and wait until it is ready. Raises ClusterError."""
        peer = PeerHandler(f"worker {number}", lambda m: self._from_worker(number, m), lambda e: self._lost(number, e))
        ready = peer.open(connect, self._hello, deadline_s)
        if not isinstance(ready, w.WorkerReady):
            raise ClusterError(f"worker {number} answered {type(ready).__name__}; is that the address of a worker?")
        with self._lock:
            self.workers[number] = peer
            self.post(t.WorkerJoined(number, ready.slots))
        return ready

    def add_shadow(self, connect: Connect, deadline_s: float) -> w.ShadowReady:
        """Open a stream to the shadow and wait until it is ready. Raises ClusterError."""
        peer = PeerHandler("shadow", self._from_shadow, lambda error: self._shadow_lost(error))
        ready = peer.open(connect, self._hello, deadline_s)
        if not isinstance(ready, w.ShadowReady):
            raise ClusterError(f"the shadow answered {type(ready).__name__}; is that the address of a shadow?")
        with self._lock:
            self.shadow = peer
            self.post(t.ShadowJoined())
        return ready

    def _from_worker(self, number: int, message: w.Message) -> None:
        if isinstance(message, w.Computed):
            with self._lock:
                call = self._calls.pop(message.call_id, None)
                if call is None:
                    return
                layer = self._layers.get(call[1].visit)
                if layer is not None:
                    output = tensor_from_bytes(message.output.dtype, message.output.shape, message.output.data)
                    layer.outputs.setdefault(call[1].expert.expert, {})[call[1].start] = output
                self.post(t.ComputeEnded(message.call_id))
        elif isinstance(message, w.Loaded):
            with self._lock:
                self._loads.pop(message.load_id, None)
                self.post(t.LoadEnded(message.load_id, message.nbytes))
        elif isinstance(message, w.Failed):
            self._worker_failed(number, message)

    def _worker_failed(self, number: int, failure: w.Failed) -> None:
        reason = f"{failure.error}: {failure.message}"
        if failure.load_id:
            self.post(t.LoadFailed(failure.load_id, reason))
        elif failure.call_id:
            self.post(t.ComputeFailed(failure.call_id, reason))
        else:
            self._lost(number, ClusterError(reason))

    def _from_shadow(self, message: w.Message) -> None:
        if isinstance(message, w.Prediction):
            self.post(t.Predicted(message.request, message.position, message.layer, message.experts))
        elif isinstance(message, w.Failed):
            self._shadow_lost(ClusterError(f"{message.error}: {message.message}"))

    def _lost(self, number: int, error: ODMoEError | None) -> None:
        with self._lock:
            peer = self.workers.pop(number, None)
            if peer is None:
                return
            _log.warning("worker %d is lost: %s", number, error or "it closed its stream")
            self._calls = {k: v for k, v in self._calls.items() if v[0] != number}
            self._loads = {k: v for k, v in self._loads.items() if v != number}
            self.post(t.WorkerLost(number, str(error or "it closed its stream")))
        peer.close()

    def _shadow_lost(self, error: ODMoEError | None) -> None:
        with self._lock:
            peer, self.shadow = self.shadow, None
            if peer is None:
                return
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
            self._loads[command.load_id] = command.worker
            self._tell(command.worker, w.Load(command.load_id, command.slot, *command.expert))
        elif isinstance(command, t.Evict):
            self._tell(command.worker, w.Evict(command.slot))
        elif isinstance(command, t.Resume):
            self._layers[command.visit].done.set()
        elif isinstance(command, t.Fail):
            self._failed[command.request] = command.reason
            for visit, layer in self._layers.items():
                if visit.request == command.request:
                    layer.done.set()
        else:
            self._act_on_shadow(command)

    def _act_on_shadow(self, command: t.Follow | t.Align | t.Unfollow) -> None:
        if self.shadow is None:
            return
        try:
            for message in self._shadow_messages(command):
                self.shadow.send(message)
        except LinkError as error:
            self._shadow_lost(error)

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
        layer = self._layers[command.visit]
        rows = slice(command.start, command.stop)
        expert = command.expert.expert
        self._calls[command.call_id] = (command.worker, command)
        self._tell(
            command.worker,
            w.Compute(
                command.call_id, command.slot, *command.expert,
                w.Tensor(*tensor_bytes(layer.hidden[expert][rows])),
                w.Tensor(*tensor_bytes(layer.weights[expert][rows])),
                command.evict,
            ),
        )  # fmt: skip

    def _tell(self, number: int, message: w.Message) -> None:
        peer = self.workers.get(number)
        if peer is None:
            return
        try:
            peer.send(message)
        except LinkError as error:
            self._lost(number, error)

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
        while visit.request not in self._failed and not layer.done.wait(self.answer_s):
            self._drop_silent(visit)
        if visit.request in self._failed:
            raise RequestFailedError(f"request {visit.request} failed: {self._failed[visit.request]}")
        if visit.request not in self._requests:
            raise RequestFailedError(f"request {visit.request} was closed")

    def _drop_silent(self, visit: t.Visit) -> None:
        """Workers that owe this visit an answer and have said nothing for `answer_s` count as lost."""
        with self._lock:
            owing = {number for number, call in self._calls.values() if call.visit == visit}
            owing |= set(self._loads.values())
            silent = [n for n in owing if n in self.workers and self.workers[n].silent_s() >= self.answer_s]
        for number in silent:
            self._lost(number, DeadlineError(f"worker {number} has said nothing for {self.answer_s:g} s"))

    def wait_for_predictions(self, number: int, deadline_s: float) -> bool:
        """Until every layer that the main model has routed was predicted too. False when that took too long."""
        ledger = self.core.ledgers[number]
        with self._changed:
            return self._changed.wait_for(lambda: self.shadow is None or ledger.unmatched == 0, deadline_s)

    def usage(self, deadline_s: float = 10.0) -> tuple[dict[int, w.WorkerUsage], w.ShadowUsage | None]:
        """What every node holds, asked of it now. A node that does not answer is left out."""
        workers: dict[int, w.WorkerUsage] = {}
        for number, peer in sorted(self.workers.items()):
            answer = peer.ask(w.AskUsage(), w.WorkerUsage, deadline_s)
            if isinstance(answer, w.WorkerUsage):
                workers[number] = answer
        shadow = self.shadow.ask(w.AskUsage(), w.ShadowUsage, deadline_s) if self.shadow else None
        return workers, shadow if isinstance(shadow, w.ShadowUsage) else None

    def close(self) -> None:
        with self._lock:
            peers = [*self.workers.values(), *([self.shadow] if self.shadow else [])]
            self.workers, self.shadow = {}, None
        for peer in peers:
            peer.close()


def align_messages(command: t.Align, token: int | None, rows: list[torch.Tensor]) -> list[w.Message]:
    """An alignment as one message, or several where it has many KV rows."""
    if command.kv_start == command.kv_stop:
        return [w.Align(command.request, command.step, token, command.kv_start, ())]
    count = command.kv_stop - command.kv_start
    row_bytes = sum(r.nbytes for r in rows) // count
    each = max(1, ALIGN_PART_BYTES // max(row_bytes, 1))
    messages: list[w.Message] = []
    for start in range(0, count, each):
        stop = min(start + each, count)
        part = tuple(w.Tensor(*tensor_bytes(r[:, :, start:stop])) for r in rows)
        messages.append(w.Align(command.request, command.step, token, command.kv_start + start, part, stop < count))
    return messages
