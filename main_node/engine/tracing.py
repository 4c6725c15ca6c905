"""The main node's part of a trace, and the traces of all nodes on one clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from main_node.engine.peer import PeerHandler
from scheduler.trace import Span, SpanTuple, assemble
from wire import messages as w
from wire.tracing import NodeSpans, machine


class MainSpans(NodeSpans):
    """What the main node does, one pass at a time."""

    def __init__(self, on: bool, clock: Callable[[], float]) -> None:
        super().__init__(on, clock)
        self._label = ""
        self._began = self._from = self._gate = 0.0

    def begin_pass(self, request: int, position: int) -> None:
        if self.on:
            self._label = f"{request}.{position}"
            self._began = self._from = self.now()

    def gate(self, layer: int) -> None:
        """Attention and gate of a layer have been computed."""
        if self.on:
            self._gate = self.now()
            self.add("layer", str(layer), self._from, self._gate)

    def announced(self, layer: int) -> None:
        """The scheduler has decided, and its commands have been sent."""
        if self.on:
            self._from = self.now()
            self.add("gate", str(layer), self._gate, self._from)

    def resumed(self, layer: int) -> None:
        """Every expert of the layer has answered."""
        if self.on:
            now = self.now()
            self.add("wait", str(layer), self._from, now)
            self._from = now

    def end_pass(self) -> None:
        if self.on:
            now = self.now()
            self.add("head", "", self._from, now)
            self.add("token", self._label, self._began, now)

    def sent_to_shadow(self, message: w.Message) -> None:
        if isinstance(message, w.Align):
            self.sent(message)

    def stalled(self, seconds: float) -> None:
        """The main node has waited `seconds` for a load, until now."""
        if self.on and seconds > 0:
            now = self.now()
            self.add("stall", "", max(now - seconds, self._gate), now)


def gather(own: list[SpanTuple], peers: Iterable[PeerHandler], deadline_s: float) -> list[Span]:
    """The spans of all nodes on this node's clock. A peer that does not answer in time is left out.

    The offset of another machine's clock is estimated from its first answer: its `now` is taken to be half-way between
    question and answer, which is wrong by at most half of that time.
    """
    end = time.monotonic() + deadline_s
    records, offsets = {"main": own}, {}
    for peer in peers:
        spans: list[SpanTuple] = []
        while True:
            sent = time.monotonic()
            answer = peer.ask(w.AskTrace(), w.TraceRecords, end - sent)
            if not isinstance(answer, w.TraceRecords):
                break
            if peer.name not in offsets:
                middle = (sent + time.monotonic()) / 2
                offsets[peer.name] = 0.0 if answer.machine == machine() else middle - answer.now
            spans += zip(answer.whats, answer.labels, answer.starts, answer.ends, strict=True)
            if not answer.more:
                break
        records[peer.name] = spans
    return assemble(records, offsets)
