"""A stage in another process, as the shadow node sees it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from checkpoint.kv import Layout
from scheduler import errors
from scheduler.errors import DeadlineError, LinkError, ODMoEError, ProtocolError
from scheduler.model_limits import ModelLimits
from shadow_node.stages.rows import joined, pieces_of
from wire import runtime
from wire.base import Channel, Handler
from wire.bounds.check import Bounds
from wire.messages import (
    CancelRun,
    Failed,
    Hello,
    Message,
    Prediction,
    RanLayers,
    RunLayers,
    StageReady,
    TakenRows,
)

HELLO_S = 10.0
"""How long a stage may take to answer Hello."""
SILENT_S = 10.0
"""How long a run may take from one gate to the next, beside `OWN_TIMES` and the other open runs."""
OWN_TIMES = 4.0
"""How long it may take besides, in times that the layers before took."""

Connect = Callable[[Handler], Channel]
Gate = Callable[[int, tuple[int, ...], tuple[float, ...]], None]
"""(layer, experts best first, their weights), as of `shadow_node.model.Routed`."""


class Entry(NamedTuple):
    """A pass comes to a stage."""

    request: int
    tokens: Sequence[int]
    hidden: torch.Tensor
    """[1, T, ...]"""
    marks: tuple[int, ...]
    """As of `RunLayers`."""
    own_s: float
    """Seconds that the layers before took."""


_Came = runtime.SimpleQueue[Message | ODMoEError]


class _Run(NamedTuple):
    came: _Came
    patience_s: float
    """How long it may take from one message to the next."""


class RemoteStage:
    """`on_lost`: called when its stream has ended, not by `close`. Thread-safe."""

    def __init__(self, number: int, limits: ModelLimits, on_lost: Callable[[ODMoEError], None]) -> None:
        self.name = f"part {number} of the shadow"
        self.ready: StageReady | None = None
        """None: not connected."""
        self.layout = Layout()
        """Of its part of a cache, once it has run."""
        self.cache_bytes = 0
        self._bounds = Bounds(limits)
        self._on_lost = on_lost
        self._channel: Channel | None = None
        self._ear: _Ear | None = None
        """Of that stream."""
        self._runs: dict[int, _Run] = {}
        self._numbers = itertools.count(1)
        self._answer: _Came = runtime.SimpleQueue()
        """To Hello."""
        self._heard = 0
        """Messages of any run that have come."""

    def reach(self, connect: Connect, hello: Hello) -> StageReady:
        """What it is; connects unless it is connected already. Raises ODMoEError."""
        if self.ready is not None:
            return self.ready
        self._answer = runtime.SimpleQueue()
        ear = self._ear = _Ear(self)
        self._channel = connect(ear)
        self.send(hello)
        answer = self._await(self._answer, lambda: HELLO_S)
        if not isinstance(answer, StageReady):
            self.close()
            raise ProtocolError(f"{self.name} answered Hello with {type(answer).__name__}; is that a stage's address?")
        self.ready = answer
        return answer

    def send(self, message: Message) -> None:
        """Raises LinkError."""
        if self._channel is None:
            raise LinkError(f"{self.name} is not connected")
        self._channel.send(message)

    def close(self) -> None:
        channel, self._channel, self._ear, self.ready = self._channel, None, None, None
        if channel is not None:
            channel.close()

    # --- a pass -------------------------------------------------------------------------------------------------

    def run(self, entry: Entry, on_gate: Gate) -> torch.Tensor | int:
        """Run its layers. Returns what goes on [1, T, ...], or from the last stage the greedy next token. `on_gate` is
        called at each of its gates, and may raise, which ends the run. Raises ODMoEError: it has failed, or is lost."""
        run = next(self._numbers)
        self._runs[run] = _Run(runtime.SimpleQueue(), SILENT_S + OWN_TIMES * entry.own_s)
        rows: list[RanLayers] = []
        try:
            self._send_rows(run, entry)
            while not rows or rows[-1].more:
                message = self._next(run)
                if isinstance(message, Prediction):
                    on_gate(message.layer, message.experts, message.scores)
                elif isinstance(message, RanLayers):
                    rows.append(message)
        except BaseException:
            self._cancel(run)
            raise
        finally:
            del self._runs[run]
        return self._result(rows)

    def _send_rows(self, run: int, entry: Entry) -> None:
        pieces = pieces_of(entry.hidden)
        for number, piece in enumerate(pieces, 1):
            more = number < len(pieces)
            tokens, marks = (tuple(entry.tokens), entry.marks) if number == 1 else ((), ())
            self.send(RunLayers(run, entry.request, tokens, piece, more, marks))
            if more and not isinstance(answer := self._next(run), TakenRows):
                raise ProtocolError(f"{self.name} answered rows with {type(answer).__name__}")

    def _result(self, rows: list[RanLayers]) -> torch.Tensor | int:
        last = rows[-1]
        self.layout, self.cache_bytes = Layout(last.axes, last.states), last.cache_bytes
        return joined([message.hidden for message in rows]) if last.token is None else last.token

    def _cancel(self, run: int) -> None:
        self._say(CancelRun(run))

    def _say(self, message: Message) -> None:
        try:
            self.send(message)
        except ODMoEError:  # the stream has ended, and with it the run
            return

    def _next(self, run: int) -> Message:
        """The next message of a run. The stage may do each other open one before it."""
        return self._await(self._runs[run].came, lambda: sum(one.patience_s for one in list(self._runs.values())))

    def _await(self, came: _Came, most_s: Callable[[], float]) -> Message:
        """What comes next. While the stage answers other runs, which end, the wait begins anew."""
        while True:
            heard, end_s = self._heard, most_s()
            try:
                found = came.get(timeout=end_s)
                break
            except runtime.Empty:
                if self._heard != heard:
                    continue
            late = DeadlineError(
                f"{self.name} did not answer within {end_s:.1f} s, though it is alive: its machine is too busy, or too "
                "slow for its layers"
            )
            self._lose(late)
            raise late
        if isinstance(found, ODMoEError):
            raise found
        return found

    # --- what comes ---------------------------------------------------------------------------------------------

    def take(self, message: Message) -> None:
        """A message has come."""
        self._bounds.check(message)
        if isinstance(message, StageReady):
            self._answer.put(message)
        elif isinstance(message, Failed):
            self._on_failed(message)
        elif isinstance(message, Prediction | RanLayers | TakenRows):
            run = message.request if isinstance(message, Prediction) else message.run
            if isinstance(message, RanLayers) and message.more:
                self._say(TakenRows(run))  # here, as its pass may stand still while another waits for this stage
            self._on_answer(run, message)
        else:
            raise ProtocolError(f"{self.name} sent {type(message).__name__}, which a stage never sends")

    def _on_failed(self, message: Failed) -> None:
        kind = getattr(errors, message.error, None)
        known = kind if isinstance(kind, type) and issubclass(kind, ODMoEError) else errors.ClusterError
        error = known(message.message)
        if not message.call_id:
            self._lose(error)
        else:
            self._on_answer(message.call_id, error)

    def _on_answer(self, number: int, answer: Message | ODMoEError) -> None:
        if (run := self._runs.get(number)) is not None:
            self._heard += 1
            run.came.put(answer)

    def end(self, ear: _Ear, error: ODMoEError | None) -> None:
        """A stream has ended."""
        if ear is self._ear:
            self._lose(error or LinkError(f"{self.name} has closed its stream"))

    def _lose(self, error: ODMoEError) -> None:
        lost = LinkError(f"{self.name} is lost: {error}") if self.ready is not None else error
        was_in_use = self.ready is not None
        self.close()
        self._answer.put(lost)
        for run in list(self._runs.values()):
            run.came.put(lost)
        if was_in_use:
            self._on_lost(lost)


class _Ear:
    """The handler of one stream."""

    def __init__(self, stage: RemoteStage) -> None:
        self._stage = stage

    def on_message(self, message: Message) -> None:
        self._stage.take(message)

    def on_close(self, error: ODMoEError | None) -> None:
        self._stage.end(self, error)
