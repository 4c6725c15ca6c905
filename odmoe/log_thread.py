"""Lines of a log: their time, and a thread that writes them. A full pipe that nobody reads blocks no request."""

from __future__ import annotations

import errno
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Self

from scheduler.one_line import escape

LOG_TIME = "%Y-%m-%dT%H:%M:%SZ"
"""Of UTC, at the front of a line."""
PLACES = 10_000
"""Lines that wait at most."""
END_S = 5.0
"""Longest wait, at the end, for lines that still wait."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors of a disk, after which a later line may be written."""

Write = Callable[[str], object]


def utc_time() -> str:
    """`2026-01-01T00:00:00Z`."""
    return time.strftime(LOG_TIME, time.gmtime())


class LogThread:
    """Writes lines in order. Where `places` lines wait already, or the disk is full, a line is lost, and the next one
    that is not says how many were."""

    def __init__(self, places: int = PLACES) -> None:
        self._lines: queue.Queue[tuple[Write, str] | None] = queue.Queue(places)
        self._lost = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)

    def line(self, text: str, write: Write | None = None) -> None:
        """Never waits. `text`: shown on one line. `write`: None is to standard error."""
        text = escape(text)
        with self._lock:
            try:
                if self._lost:
                    text_of_lost = f"{self._lost} lines are lost: standard error is not read, or on a full disk"
                    self._lines.put_nowait((_to_stderr, text_of_lost))
                    self._lost = 0
                self._lines.put_nowait((write or _to_stderr, text))
            except queue.Full:
                self._lost += 1

    def _run(self) -> None:
        while (found := self._lines.get()) is not None:
            write, text = found
            try:
                write(text)
            except OSError as error:
                if error.errno not in FULL:  # closed: nobody is there to tell
                    return
                with self._lock:
                    self._lost += 1
            except ValueError:  # closed
                return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._lines.put(None, timeout=END_S)
        except queue.Full:
            return
        self._thread.join(END_S)


def _to_stderr(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
