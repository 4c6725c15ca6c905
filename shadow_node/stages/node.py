"""A node with some of the shadow's later layers. It runs them when the shadow node asks."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

from checkpoint import kv
from checkpoint.devices.inference import inference
from checkpoint.devices.streams import borrow, on_streams
from checkpoint.tensors import received_tensor
from scheduler.errors import DeadlineError, LinkError, ODMoEError, ProtocolError
from shadow_node.node import MAX_REQUESTS, device_name
from shadow_node.stages.later import LaterStage
from shadow_node.stages.remote import SILENT_S
from shadow_node.stages.rows import joined, pieces_of
from wire import runtime
from wire.base import Channel
from wire.machine import host_name
from wire.messages import (
    PROTOCOL_VERSION,
    AlignLayers,
    CancelRun,
    CloseRequest,
    Failed,
    MarkLayers,
    Message,
    Prediction,
    RanLayers,
    ReturnTo,
    RunLayers,
    StageReady,
    TakenRows,
    Tensor,
)
from wire.serial import SerialThread
from wire.sessions import Session, Sessions

_Change = AlignLayers | MarkLayers | ReturnTo
_NOTHING = Tensor("float32", (0,), b"")


class Stage:
    """Serves one shadow node at a time."""

    def __init__(self, name: str, model: LaterStage, fingerprint: str, dtype: str) -> None:
        self.name = name
        self.model = model
        self.belongs = fingerprint, dtype
        self.sessions: Sessions[_Session] = Sessions()

    def accept(self, reply: Channel) -> _Session:
        return self.sessions.add(_Session(self, reply))

    def close(self) -> None:
        self.sessions.close()


class _Dropped(BaseException):
    """Ends the run in progress."""


class _Request:
    """Its cache here, and the ways back."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.marks: dict[int, kv.Mark] = {}
        self.fault: ODMoEError | None = None
        """What has gone wrong since its last run, which its next one reports."""


class _Session(Session):
    """One shadow node's stream. All work is done on one thread, in the order in which it came."""

    def __init__(self, stage: Stage, reply: Channel) -> None:
        super().__init__(stage.name, stage.belongs, stage.sessions, reply, limits=stage.model.limits)
        self._model = stage.model
        self._requests: dict[int, _Request] = {}
        self._entering: dict[int, list[RunLayers]] = {}
        """Run -> its rows, as far as they have come."""
        self._said = runtime.Condition(runtime.Lock())
        """Guards `_cancelled` and `_taken`."""
        self._cancelled: set[int] = set()
        self._taken: set[int] = set()
        """Runs whose last piece of outputs was taken."""
        self._changes: dict[int, deque[_Change]] = {}
        """Request -> what is still to be done to its cache, in order."""
        self._thread = SerialThread(f"{stage.name}-runs", self.report)

    def ready(self) -> StageReady:
        model = self._model
        return StageReady(
            version=PROTOCOL_VERSION,
            node=self.name,
            scheme=model.scheme,
            first=model.division.first,
            stop=model.division.stop,
            device_bytes=model.device_bytes,
            host=host_name(),
            pid=os.getpid(),
            device_name=device_name(model.device),
            device=model.device,
        )

    def dispatch(self, message: Message) -> None:
        if isinstance(message, RunLayers):
            self._enter(message)
        elif isinstance(message, CancelRun):
            self._entering.pop(message.run, None)
            self._note(self._cancelled, message.run)
        elif isinstance(message, TakenRows):
            self._note(self._taken, message.run)
        elif isinstance(message, AlignLayers | MarkLayers | ReturnTo):
            self._changes.setdefault(message.request, deque()).append(message)
            self._thread.submit(self._change, message)
        elif isinstance(message, CloseRequest):
            self._thread.submit(self._close_request, message.request)
        else:
            raise ProtocolError(f"a part of a shadow does not take {type(message).__name__}")

    def _enter(self, message: RunLayers) -> None:
        parts = self._entering.setdefault(message.run, [])
        parts.append(message)
        if message.more:
            self.reply.send(TakenRows(message.run))
            return
        del self._entering[message.run]
        self._thread.submit(self._run, parts)

    def _note(self, runs: set[int], run: int) -> None:
        with self._said:
            runs.add(run)
            self._said.notify_all()

    def end(self) -> None:
        with self._said:
            self._said.notify_all()
        self._thread.close()

    def report(self, error: BaseException, about: Message | None = None) -> None:
        if self.over or isinstance(error, LinkError):
            return
        run = about.run if isinstance(about, RunLayers) else 0
        self.reply.send(Failed(type(error).__name__, f"{self.name}: {error}", call_id=run))

    # --- on the runs' thread ------------------------------------------------------------------------------------

    def _close_request(self, number: int) -> None:
        self._requests.pop(number, None)
        self._changes.pop(number, None)

    def _change(self, message: _Change) -> None:
        """Unless `_take_over` has done it."""
        due = self._changes.get(message.request)
        if due and due[0] is message:
            self._make(due.popleft())

    def _take_over(self, number: int) -> None:
        """The rows that have come for the request of this run, up to another change of its cache, which comes first."""
        due = self._changes.get(number)
        while due and isinstance(due[0], AlignLayers) and due[0].taken_over:
            self._make(due.popleft())

    def _make(self, message: _Change) -> None:
        request = self._requests.get(message.request)
        if request is None or request.fault is not None:
            return
        try:
            if isinstance(message, MarkLayers):
                request.marks[message.mark] = kv.mark(request.cache, message.rows)
            elif isinstance(message, ReturnTo):
                kv.go_to(request.cache, request.marks.pop(message.mark))
            else:
                self._put(request, message)
        except (ODMoEError, KeyError) as error:
            request.fault = error if isinstance(error, ODMoEError) else ProtocolError(f"there is no mark {error}")

    def _put(self, request: _Request, message: AlignLayers) -> None:
        tensors = [received_tensor(sent) for sent in message.kv]
        borrow(tensors)
        with on_streams(self._model.streams):
            put = kv.take_over if message.taken_over else kv.put
            put(self._own_layers(request), message.kv_start, tensors)

    def _own_layers(self, request: _Request) -> kv.Layers:
        division = self._model.division
        return kv.layers_of(request.cache, division.first, division.stop)

    def _run(self, parts: list[RunLayers]) -> None:
        run, first = parts[0].run, parts[0]
        with self._said:
            for runs in (self._cancelled, self._taken):
                runs.difference_update({past for past in runs if past < run})
        if self._is_dropped(run):
            return
        try:
            request = self._request_of(first)
            self._answer(run, request, self._compute(first, request, [part.hidden for part in parts]))
        except (_Dropped, LinkError):
            return
        except Exception as error:  # noqa: BLE001 - the shadow would wait; other requests go on
            self.report(error, first)

    def _request_of(self, message: RunLayers) -> _Request:
        """Raises what has gone wrong with it since its last run."""
        request = self._requests.get(message.request)
        if request is None:
            if len(self._requests) >= MAX_REQUESTS:
                raise ProtocolError(f"{self.name} has {MAX_REQUESTS} requests already; close some")
            request = self._requests[message.request] = _Request(self._model.new_cache())
        request.marks = {number: mark for number, mark in request.marks.items() if number in message.marks}
        fault, request.fault = request.fault, None
        if fault is not None:
            raise fault
        return request

    def _compute(self, message: RunLayers, request: _Request, hidden: list[Any]) -> Any:
        run = message.run

        def on_routed(layer: int, experts: list[int], scores: list[float]) -> None:
            if self._is_dropped(run):
                raise _Dropped
            self._take_over(message.request)
            self.reply.send(Prediction(run, 0, layer, tuple(experts), tuple(scores)))

        rows = joined(hidden)
        if rows.dim() < 3 or rows.shape[:2] != (1, len(message.tokens)):
            raise ProtocolError(f"hidden states of shape {tuple(rows.shape)} came for {len(message.tokens)} tokens")
        self._model.on_routed = on_routed
        try:
            with inference(), on_streams(self._model.streams):
                return self._model.run(list(message.tokens), rows, request.cache)
        finally:
            self._model.on_routed = None

    def _answer(self, run: int, request: _Request, found: Any) -> None:
        held = sum(kv.cache_bytes(one.cache) + sum(m.nbytes for m in one.marks.values()) for one in self._all())
        layout = kv.layout(self._own_layers(request))
        if isinstance(found, int):
            self.reply.send(RanLayers(run, _NOTHING, False, found, layout.axes, layout.states, held))
            return
        pieces = pieces_of(found)
        for number, piece in enumerate(pieces, 1):
            more = number < len(pieces)
            self.reply.send(RanLayers(run, piece, more, None, layout.axes, layout.states, held))
            if more:
                self._await_taken(run)

    def _await_taken(self, run: int) -> None:
        with self._said:
            if not self._said.wait_for(lambda: run in self._taken or self._is_dropped(run), SILENT_S):
                raise DeadlineError(f"the shadow did not take its rows within {SILENT_S:g} s")
            self._taken.discard(run)
        if self._is_dropped(run):
            raise _Dropped

    def _is_dropped(self, run: int) -> bool:
        return self.over or run in self._cancelled

    def _all(self) -> list[_Request]:
        return list(self._requests.values())
