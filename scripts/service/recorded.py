"""`odmoe serve` whose engine keeps a record of each request's loads: a JSON line for a request, once it is closed.

`python -m scripts.service.recorded RECORD serve ...` is `odmoe serve ...` on an embedded cluster, that writes RECORD.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from main_node.engine.engine import Engine
from main_node.engine.sequence import Sequence
from scheduler import types as t
from scheduler.core.machine import Core


@dataclass(slots=True)
class Loads:
    """Of one request. Times by `time.monotonic`, which is one clock for all processes of a machine."""

    max_new_tokens: int
    """By which a client knows its own, if each asks for another number."""
    loads: int = 0
    last_load: float | None = None
    """When the last one began."""
    closed: float = 0.0
    """When the engine had given up, or answered, all of it."""
    open: int = 0
    """Requests that were open then, without this one."""
    in_flight: int = 0
    """Loads that were in flight then, of all requests."""


class LoadRecord:
    """Thread-safe as the engine is, whose lock is held by whoever calls the scheduler."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._open: dict[int, Loads] = {}
        self._lock = threading.Lock()

    def opened(self, number: int, data: Sequence) -> None:
        with self._lock:
            self._open[number] = Loads(data.max_new_tokens)

    def handled(self, core: Core, event: t.Event, commands: list[t.Command]) -> None:
        """The scheduler has taken `event` and answered with `commands`."""
        if any(isinstance(command, t.Load) for command in commands):
            self._note_loads(core)
        if isinstance(event, t.RequestClosed):
            self._note_closed(core, event.request)

    def _note_loads(self, core: Core) -> None:
        now = time.monotonic()
        with self._lock:
            for number, one in self._open.items():
                stats = core.stats.get(number)
                if stats is not None and stats.loads > one.loads:
                    one.loads, one.last_load = stats.loads, now

    def _note_closed(self, core: Core, number: int) -> None:
        with self._lock:
            one = self._open.pop(number, None)
            if one is None:  # an answer that was withdrawn is closed twice
                return
            one.closed, one.open, one.in_flight = time.monotonic(), len(self._open), len(core.snapshot().loads)
            self._file.write(json.dumps(asdict(one)) + "\n")
            self._file.flush()


def read_record(path: Path) -> list[Loads]:
    """The requests that were closed, in that order."""
    return [Loads(**json.loads(line)) for line in path.read_text().splitlines()]


def install(record: LoadRecord) -> None:
    """Tell `record` of everything that any engine of this process does from now on."""
    opening: Callable[..., Any] = Engine.open_request
    handle: Callable[..., Any] = Core.handle

    def open_request(self: Engine, number: int, data: Sequence, prompt_tokens: int) -> None:
        record.opened(number, data)
        opening(self, number, data, prompt_tokens)

    def handled(self: Core, event: t.Event, now: float) -> list[t.Command]:
        commands: list[t.Command] = handle(self, event, now)
        record.handled(self, event, commands)
        return commands

    Engine.open_request, Core.handle = open_request, handled  # type: ignore[method-assign]


def run() -> None:
    from odmoe.__main__ import main as odmoe

    with open(sys.argv.pop(1), "w") as file:
        install(LoadRecord(file))
        odmoe()


if __name__ == "__main__":
    run()
