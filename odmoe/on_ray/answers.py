"""The open answers of a main node's process. Each is cancelled when its client stops renewing it. No ray here."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Protocol

from scheduler.errors import RequestCancelledError

HELD_S = 30.0
"""Silence of a client after which its answers are cancelled: its process is gone, or stands still."""
LOOKS = 6
"""Checks in `HELD_S`. A client renews its answers as often."""


class Cancellable(Protocol):
    def cancel(self) -> None: ...

    def close(self) -> None: ...


class Answers:
    """Thread-safe. Silence is counted in checks, not by the clock: a process that was itself stopped could not receive
    renewals. It receives those that were sent meanwhile before its next check but one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, Cancellable] = {}
        self._silent: dict[str, int] = {}
        """Checks since the last renewal, by answer."""
        self._cancelled: dict[str, int] = {}
        """Answers cancelled before they began, with the checks since."""
        self._dropped: set[str] = set()
        """Answers cancelled because of their client's silence."""

    @contextlib.contextmanager
    def under_way(self, key: str, answer: Cancellable) -> Iterator[None]:
        """Keep `answer` open while it is iterated over, then close it."""
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
                f"the answer was cancelled: its client has been silent for {HELD_S:g} s; send the request again"
            ) from error
        finally:
            with self._lock:
                del self._open[key], self._silent[key]
                self._dropped.discard(key)
            answer.close()

    def cancel(self, key: str) -> None:
        """Cancel an answer that is under way or has yet to begin."""
        with self._lock:
            answer = self._open.get(key)
            if answer is None:
                self._cancelled[key] = 0
        if answer is not None:
            answer.cancel()

    def hold(self, keys: Iterable[str]) -> None:
        """Renew these answers: their client still wants them."""
        with self._lock:
            self._silent |= {key: 0 for key in keys if key in self._open}

    def cancel_unwanted(self) -> None:
        """Cancel the answers that were not renewed in the last `LOOKS` checks."""
        with self._lock:
            self._silent = {key: looks + 1 for key, looks in self._silent.items()}
            # After so long, the answer had ended before it was cancelled, or will not be renewed.
            self._cancelled = {key: looks + 1 for key, looks in self._cancelled.items() if looks < 20 * LOOKS}
            late = {key: self._open[key] for key, looks in self._silent.items() if looks > LOOKS}
            self._dropped |= late.keys()
        for answer in late.values():
            answer.cancel()

    def watch(self, over: threading.Event) -> None:
        """Start a thread that checks until `over` is set."""

        def run() -> None:
            while not over.wait(HELD_S / LOOKS):
                self.cancel_unwanted()

        threading.Thread(target=run, name="main-held", daemon=True).start()
