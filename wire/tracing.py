"""A node's part of a trace, and the key of a message, the same on both sides of its stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from scheduler.trace import CAME, SENT, SpanTuple, Tracer
from wire.messages import Align, Compute, Computed, Prediction, TraceRecords

TracedMessage = Compute | Align | Computed | Prediction
PART = 20_000
"""Records in one message."""


class NodeSpans:
    """Records spans of what a node does. While not `on` it keeps nothing and costs next to nothing."""

    def __init__(self, on: bool, clock: Callable[[], float]) -> None:
        self.on = on
        self._tracer = Tracer(clock)
        self._rest: list[SpanTuple] = []

    def now(self) -> float:
        return self._tracer.clock()

    def add(self, what: str, label: str, start: float, end: float) -> None:
        if self.on:
            self._tracer.add(what, label, start, end)

    def on_sent(self, message: TracedMessage) -> None:
        if self.on:
            self._tracer.mark(SENT, key_of(message))

    def on_received(self, message: TracedMessage) -> None:
        if self.on:
            self._tracer.mark(CAME, key_of(message))

    def take(self) -> list[SpanTuple]:
        """Spans since the last call."""
        return self._tracer.take()

    def answer(self) -> TraceRecords:
        """Spans since the last answer, at most PART of them."""
        self._rest += self.take()
        part, self._rest = self._rest[:PART], self._rest[PART:]
        whats, labels, starts, ends = zip(*part, strict=True) if part else ((), (), (), ())
        return TraceRecords(machine(), self.now(), whats, labels, starts, ends, bool(self._rest))


def key_of(message: TracedMessage) -> str:
    """The same on both sides of a stream, and unique among the messages in flight between two nodes."""
    if isinstance(message, Compute):
        return f"{message.layer}.{message.expert} to #{message.call_id}"
    if isinstance(message, Computed):
        return f"from #{message.call_id}"
    if isinstance(message, Prediction):
        return f"prediction {message.layer} {message.request}.{message.position}"
    return f"align {message.request}.{message.step} {message.kv_start}"


def machine() -> str:
    """An id of the running kernel: processes with the same id share a monotonic clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
