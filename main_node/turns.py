"""Passes of several requests take turns."""

from __future__ import annotations

import threading
from collections import deque

from scheduler.errors import DeadlineError


class Turns:
    """A fair lock: one pass at a time, first come first served. Open requests thus take turns.

    A plain lock would let a request that has just had its turn take the next one too.
    """

    def __init__(self, deadline_s: float) -> None:
        """`deadline_s`: longest wait for a turn."""
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._busy = False
        self._waiting: deque[threading.Event] = deque()

    def __enter__(self) -> None:
        """Raises DeadlineError."""
        with self._lock:
            if not self._busy:
                self._busy = True
                return
            turn = threading.Event()
            self._waiting.append(turn)
        try:
            if turn.wait(self._deadline_s):
                return
        except BaseException:  # interrupted: its place in the queue must not block the others
            self._leave(turn)
            raise
        with self._lock:
            if turn not in self._waiting:  # its turn came at the last moment
                return
            self._waiting.remove(turn)
        raise DeadlineError(f"a request waited {self._deadline_s:g} s for its turn; send fewer at once")

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._pass_on()

    def _leave(self, turn: threading.Event) -> None:
        with self._lock:
            if turn in self._waiting:
                self._waiting.remove(turn)
            else:
                self._pass_on()

    def _pass_on(self) -> None:
        if self._waiting:
            self._waiting.popleft().set()
        else:
            self._busy = False
