"""Who is connected to a node, and whom it serves: the last main node that belongs here and has said Hello."""

from __future__ import annotations

import threading
from typing import Generic, Protocol, TypeVar

from scheduler.errors import ODMoEError


class Session(Protocol):
    """One stream to a node, as that node keeps it."""

    def on_close(self, error: ODMoEError | None) -> None: ...

    def replaced(self) -> None:
        """Another main node is served from now on: tell this one, and end its stream."""


S = TypeVar("S", bound=Session)


class Sessions(Generic[S]):
    """Thread-safe. Nobody is disturbed by a stream that never says Hello, or is refused."""

    def __init__(self) -> None:
        self._open: set[S] = set()
        self._served: S | None = None
        self._lock = threading.Lock()

    def add(self, session: S) -> S:
        """A stream was opened."""
        with self._lock:
            self._open.add(session)
        return session

    def serve(self, session: S) -> None:
        """It has said Hello and belongs here: from now on it is the one."""
        with self._lock:
            before, self._served = self._served, session
        if before is not None and before is not session:
            before.replaced()

    def forget(self, session: S) -> None:
        """Its stream is over."""
        with self._lock:
            self._open.discard(session)
            if self._served is session:
                self._served = None

    def close(self) -> None:
        """End every stream."""
        with self._lock:
            sessions = list(self._open)
        for session in sessions:
            session.on_close(None)
