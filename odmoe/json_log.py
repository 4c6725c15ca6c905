"""Standard error as JSON: each line is an object, whoever wrote it."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import threading
from typing import Any, TextIO

from odmoe.log_thread import utc_time

_TIMED = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ) (.*)", re.DOTALL)


def as_json_line(text: str) -> str:
    """A line as it is where it is a JSON object; else `{"time": ..., "message": ...}`, with the line's own time where
    it begins with one."""
    if text.startswith("{"):
        try:
            json.loads(text)
            return text
        except ValueError:
            pass
    timed = _TIMED.fullmatch(text)
    time, message = timed.groups() if timed else (utc_time(), text)
    return json.dumps({"time": time, "message": message})


class JsonLines(io.TextIOBase):
    """A text stream. Each thread's lines are made of what this thread writes."""

    def __init__(self, to: TextIO) -> None:
        super().__init__()
        self._to = to
        self._begun = threading.local()
        self._writing = threading.Lock()

    def write(self, text: str) -> int:
        *lines, self._begun.text = (getattr(self._begun, "text", "") + text).split("\n")
        made = "".join(f"{as_json_line(line)}\n" for line in lines if line.strip())
        if made:
            with self._writing:
                self._to.write(made)
                self._to.flush()
        return len(text)

    def flush(self) -> None:
        """Lines are written when they are whole."""

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._to.fileno()

    @property
    def buffer(self) -> Any:
        """For those who write bytes."""
        return _Bytes(self)


class _Bytes(io.RawIOBase):
    """A character may be cut between two writes; its parts are then shown as U+FFFD."""

    def __init__(self, lines: JsonLines) -> None:
        super().__init__()
        self._lines = lines

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._lines.write(bytes(data).decode(errors="replace"))
        return len(data)


def use_json_log() -> None:
    """From now on to the end of the process `sys.stderr` is JSON, errors that end a command and the lines of `logging`
    and `warnings` included."""
    lines = JsonLines(sys.stderr)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
            handler.setStream(lines)
    sys.stderr = lines
    logging.captureWarnings(True)
