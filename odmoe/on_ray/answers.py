"""The answers that a main node's process has under way, and whether whoever asked still wants them. No ray here."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Protocol

from scheduler.errors import RequestCancelledError

HELD_S = 30.0
"""An answer whose asker has not been heard of for so long is given up: its process is gone, or stands still."""
LOOKS = 6
"""How often is looked in that time; as often an asker says which answers it wants."""


class Cancellable(Protocol):
    def cancel(self) -> None: ...

    def close(self) -> None: ...


class Answers:
    """Thread-safe. Silence is counted in looks, not by the clock: a process that was itself stopped has not listened,
    and hears what was said meanwhile before its next look but one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, Cancellable] = {}
        self._silent: dict[str, int] = {}  # looks since it was last said to be wanted
        self._cancelled: dict[str, int] = {}  # before they began; and looks since
        self._dropped: set[str] = set()

    @contextlib.contextmanager
    def under_way(self, key: str, answer: Cancellable) -> Iterator[None]:
        """As long as `answer` is iterated over; it is closed afterwards."""
        with self._lock:
            self._open[key], self._silent[key] = answer, 0
            unwanted = self._cancelled.pop(key, None) is not None
        try:
            if unwanted:
                answer.cancel()
            yield
        except RequestCancelledError as error:
            if key not in self._dropped:
                raise
            raise RequestCancelledError(
                f"the answer was given up: whoever asked for it was not heard of for {HELD_S:g} s; ask again"
            ) from error
        finally:
            with self._lock:
                del self._open[key], self._silent[key]
                self._dropped.discard(key)
            answer.close()

    def cancel(self, key: str) -> None:
        """It is no longer wanted, be it under way or yet to begin."""
        with self._lock:
            answer = self._open.get(key)
            if answer is None:
                self._cancelled[key] = 0
        if answer is not None:
            answer.cancel()

    def hold(self, keys: Iterable[str]) -> None:
        """These are still wanted."""
        with self._lock:
            self._silent |= {key: 0 for key in keys if key in self._open}

    def look(self) -> None:
        """Give up those that nobody has asked for in the last `LOOKS` looks."""
        with self._lock:
            self._silent = {key: looks + 1 for key, looks in self._silent.items()}
            # One that is told of so late had ended before, or will find nobody who holds it.
            self._cancelled = {key: looks + 1 for key, looks in self._cancelled.items() if looks < 20 * LOOKS}
            late = {key: self._open[key] for key, looks in self._silent.items() if looks > LOOKS}
            self._dropped |= late.keys()
        for answer in late.values():
            answer.cancel()

    def watch(self, over: threading.Event) -> None:
        """Look until `over`: a thread."""

        def run() -> None:
            while not over.wait(HELD_S / LOOKS):
                self.look()

        threading.Thread(target=run, name="main-held", daemon=True).start()
