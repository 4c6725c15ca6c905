"""Passes of several requests take turns."""

from __future__ import annotations

import threading
from collections import deque

from scheduler.errors import DeadlineError


class Turns:
    """One at a time, first come first served: with every request waiting for its next token, a round robin.

    A plain lock would let a request that has just had its turn take the next one too. `deadline_s`: most wait.
    """

    def __init__(self, deadline_s: float) -> None:
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
        except BaseException:  # interrupted: nobody else would leave the line, or pass the turn on
            self._leave(turn)
            raise
        with self._lock:
            if turn not in self._waiting:  # it came at the last moment
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
