"""The main node's part of a trace, and everyone's put together."""

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

    def asked(self, layer: int) -> None:
        """The scheduler has decided and the workers have been told."""
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

    def told(self, message: w.Message) -> None:
        """The shadow was sent something."""
        if isinstance(message, w.Align):
            self.sent(message)

    def stalled(self, seconds: float) -> None:
        """Until now the main node has waited for a load, for so long."""
        if self.on and seconds > 0:
            now = self.now()
            self.add("stall", "", max(now - seconds, self._gate), now)


def gather(own: list[SpanTuple], peers: Iterable[PeerHandler], deadline_s: float) -> list[Span]:
    """Everyone's spans on this node's clock. A peer that does not answer in time is left out.

    Another machine's clock is set by its answer to the first question: it said `now` half-way between question and
    answer, give or take half of that time.
    """
    end = time.monotonic() + deadline_s
    records, offsets = {"main": own}, {}
    for peer in peers:
        told: list[SpanTuple] = []
        while True:
            asked = time.monotonic()
            answer = peer.ask(w.AskTrace(), w.TraceRecords, end - asked)
            if not isinstance(answer, w.TraceRecords):
                break
            if peer.name not in offsets:
                middle = (asked + time.monotonic()) / 2
                offsets[peer.name] = 0.0 if answer.machine == machine() else middle - answer.now
            told += zip(answer.whats, answer.labels, answer.starts, answer.ends, strict=True)
            if not answer.more:
                break
        records[peer.name] = told
    return assemble(records, offsets)
