"""A limit for what may wait on other hosts in many places: the main thread is interrupted, as by Ctrl-C.

The signal is one of its own: a shell has its background jobs ignore SIGINT.
"""

from __future__ import annotations

import signal
import threading
from types import TracebackType


class TimeLimit:
    """Within the `with` block of the main thread, KeyboardInterrupt is raised after some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.is_over = False
        self._lock = threading.Lock()
        self._thread = threading.main_thread().ident or 0
        self._timer = threading.Timer(seconds, self._on_end)
        self._timer.daemon = True

    def __enter__(self) -> TimeLimit:
        self._before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._timer.cancel()
        signal.signal(signal.SIGUSR1, self._before)

    def _on_end(self) -> None:
        with self._lock:
            if not self._timer.finished.is_set():
                self.is_over = True
                signal.pthread_kill(self._thread, signal.SIGUSR1)  # it ends a wait of the main thread, too
