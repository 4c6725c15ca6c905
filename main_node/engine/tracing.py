"""The main node's part of a trace, and the traces of all nodes on one clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from main_node.engine.peer import PeerHandler
from scheduler import types as t
from scheduler.core.machine import Core
from scheduler.trace import Span, SpanTuple, assemble
from wire import messages as w
from wire import runtime
from wire.tracing import NodeSpans, machine


@dataclass(slots=True)
class _Pass:
    """When parts of a pass began or ended."""

    label: str
    began: float
    since: float
    """The end of its last span."""
    gate: float = 0.0


class MainSpans(NodeSpans):
    """What the main node does. Spans of several requests' passes overlap where one of them waits."""

    def __init__(self, on: bool, clock: Callable[[], float]) -> None:
        super().__init__(on, clock)
        self._passes: dict[int, _Pass] = {}
        self._gate = 0.0

    def begin_step(self, passes: tuple[t.Pass, ...]) -> None:
        if self.on:
            now = self.now()
            for one in passes:
                self._passes[one.request] = _Pass(f"{one.request}.{one.position}", now, now)

    def gate(self, visit: t.Visit) -> None:
        """Attention and gate of a layer have been computed."""
        one = self._passes.get(visit.request)
        if one is not None:
            self._gate = one.gate = self.now()
            self.add("layer", str(visit.layer), one.since, one.gate)

    def on_announced(self, visit: t.Visit) -> None:
        """The scheduler has decided, and its commands have been sent."""
        one = self._passes.get(visit.request)
        if one is not None:
            one.since = self.now()
            self.add("gate", str(visit.layer), one.gate, one.since)

    def on_resumed(self, visit: t.Visit) -> None:
        """Every expert of the layer has answered, and the main model goes on with this pass."""
        one = self._passes.get(visit.request)
        if one is not None:
            now = self.now()
            self.add("wait", str(visit.layer), one.since, now)
            one.since = now

    def end_pass(self, request: int) -> None:
        one = self._passes.pop(request, None)
        if one is not None:
            now = self.now()
            self.add("head", "", one.since, now)
            self.add("token", one.label, one.began, now)

    def drop_pass(self, request: int) -> None:
        """It does not come to its end."""
        self._passes.pop(request, None)

    def sent_to_shadow(self, message: w.Message) -> None:
        if isinstance(message, w.Align):
            self.on_sent(message)

    def add_stall(self, seconds: float) -> None:
        """The main node has waited `seconds` for a load, until now."""
        now = self.now()
        self.add("stall", "", max(now - seconds, self._gate), now)


class EventSpans:
    """Adds a span for each wait for a load, when that load has ended, and drops the passes of closed requests."""

    def __init__(self, spans: MainSpans, core: Core) -> None:
        self._spans, self._core = spans, core
        self._before_s = 0.0

    def on_handled(self, event: t.Event, now: float, commands: list[t.Command]) -> None:
        """See `main_node.engine.engine.Observer`."""
        before_s, self._before_s = self._before_s, self._core.stalled_s
        if isinstance(event, t.LoadEnded) and self._before_s > before_s:
            self._spans.add_stall(self._before_s - before_s)
        elif isinstance(event, t.RequestClosed):
            self._spans.drop_pass(event.request)


def gather(own: list[SpanTuple], peers: Iterable[PeerHandler], deadline_s: float) -> list[Span]:
    """The spans of all nodes on this node's clock. A peer that does not answer in time is left out.

    The offset of another machine's clock is estimated from its first answer: its `now` is taken to be half-way between
    question and answer, which is wrong by at most half of that time.
    """
    end = runtime.monotonic() + deadline_s
    records, offsets = {"main": own}, {}
    for peer in peers:
        spans: list[SpanTuple] = []
        while True:
            sent = runtime.monotonic()
            answer = peer.ask(w.AskTrace(), w.TraceRecords, end - sent)
            if not isinstance(answer, w.TraceRecords):
                break
            if peer.name not in offsets:
                middle = (sent + runtime.monotonic()) / 2
                offsets[peer.name] = 0.0 if answer.machine == machine() else middle - answer.now
            spans += zip(answer.whats, answer.labels, answer.starts, answer.ends, strict=True)
            if not answer.more:
                break
        records[peer.name] = spans
    return assemble(records, offsets)
