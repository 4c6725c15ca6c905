"""Traces: what every node did and when, as spans on one common clock, and a file in Chrome's trace event format.

The simulator and real runs write the same spans, so that the same picture serves both. The kinds of spans:

main     token (one pass), layer (attention to gate), gate (scheduling, sending), wait (for experts), stall (of that,
         for a load), head (outputs added, next token)
shadow   shadow (one layer), late (the wait for an alignment: the late departure), align (applying an alignment)
worker   load, given up (a load that was evicted in flight), compute, evict
any      transfer (a message to or from that node)
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler.errors import ConfigError
from scheduler.files import write_whole

LIMIT = 400_000
SENT, CAME = "sent", "came"
_LANES = {"wait": 1, "stall": 1, "load": 1, "given up": 1, "late": 1, "align": 1, "token": 2}
"""A node's spans that may overlap its computation are drawn on a line of their own."""


@dataclass(frozen=True, slots=True)
class Span:
    """What `row` (main, shadow, worker N) did from `start` to `end` seconds."""

    row: str
    what: str
    label: str
    start: float
    end: float


SpanTuple = tuple[str, str, float, float]
"""(what, label, start, end): a span whose row follows from the node that sent it."""


class Tracer:
    """A node's spans on its own clock. At LIMIT entries the oldest ones are dropped. Any thread may add."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, limit: int = LIMIT) -> None:
        self.clock = clock
        self._records: deque[SpanTuple] = deque(maxlen=limit)

    def add(self, what: str, label: str, start: float, end: float) -> None:
        self._records.append((what, label, start, end))

    def mark(self, what: str, key: str) -> None:
        """A message was SENT or CAME; `key` is the same on both sides."""
        now = self.clock()
        self._records.append((what, key, now, now))

    def take(self) -> list[SpanTuple]:
        """Remove and return all records so far."""
        taken = []
        while self._records:
            taken.append(self._records.popleft())
        return taken


def assemble(records: dict[str, list[SpanTuple]], offsets: dict[str, float]) -> list[Span]:
    """One list of spans on the main node's clock, ascending by start.

    `records`: row -> what it recorded; `offsets`: row -> seconds to add to its clock, 0 where not named. A message that
    was sent and came is a transfer of the row that is not main, never shorter than 0 s.
    """
    spans: list[Span] = []
    sent: dict[str, tuple[str, float]] = {}
    came: dict[str, tuple[str, float]] = {}
    for row, of_row in records.items():
        shift = offsets.get(row, 0.0)
        for what, label, start, end in of_row:
            if what in (SENT, CAME):
                (sent if what == SENT else came)[label] = row, start + shift
            else:
                spans.append(Span(row, what, label, start + shift, end + shift))
    for key, (sender, start) in sent.items():
        if key in came:
            receiver, end = came[key]
            row = receiver if sender == "main" else sender
            spans.append(Span(row, "transfer", key, start, max(start, end)))
    return sorted(spans, key=lambda span: span.start)


def write_trace(path: Path, spans: Iterable[Span], about: dict[str, Any]) -> None:
    """For ui.perfetto.dev and chrome://tracing. Raises OSError."""
    spans = list(spans)
    rows = sorted({span.row for span in spans}, key=_place)
    events: list[dict[str, Any]] = []
    for pid, row in enumerate(rows):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": row}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
    origin = min((span.start for span in spans), default=0.0)
    for number, span in enumerate(spans):
        events += _events(span, number, rows.index(span.row), origin)
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
    write_whole(path, json.dumps(document).encode())


def _place(row: str) -> tuple[int, int]:
    kind, _, number = row.partition(" ")
    return ("main", "shadow", "worker").index(kind), int(number or 0)


def _events(span: Span, number: int, pid: int, origin: float) -> list[dict[str, Any]]:
    """Times in microseconds. Transfers may overlap each other: those are asynchronous events."""
    common = {"name": f"{span.what} {span.label}".strip(), "cat": span.what, "pid": pid}
    start, end = (span.start - origin) * 1e6, (span.end - origin) * 1e6
    if span.what == "transfer":
        both = common | {"id": number, "tid": 9}
        return [both | {"ph": "b", "ts": start}, both | {"ph": "e", "ts": end}]
    return [common | {"ph": "X", "tid": _LANES.get(span.what, 0), "ts": start, "dur": end - start}]


def read_trace(path: Path) -> tuple[list[Span], dict[str, Any]]:
    """The spans of a file that `write_trace` wrote, from 0 s on, and its description. Raises ConfigError."""
    try:
        document = json.loads(path.read_text())
        events = document["traceEvents"]
        rows = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
        begun = {e["id"]: e for e in events if e["ph"] == "b"}
        spans = []
        for event in events:
            if event["ph"] == "X":
                start, end = event["ts"], event["ts"] + event["dur"]
            elif event["ph"] == "e":
                start, end = begun[event["id"]]["ts"], event["ts"]
            else:
                continue
            label = event["name"].removeprefix(event["cat"]).strip()
            spans.append(Span(rows[event["pid"]], event["cat"], label, start / 1e6, end / 1e6))
        return spans, document["otherData"]
    except OSError as error:
        raise ConfigError(
            f"trace {path} cannot be read: {error.strerror or error}; make one with odmoe generate --trace FILE"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is no trace of odmoe; make one with odmoe generate --trace FILE") from error
