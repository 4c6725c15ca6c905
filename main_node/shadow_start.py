"""The shadow comes up beside the first prefill."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from scheduler.errors import LaunchError

LOOK_S = 0.1
"""How often an answer that waits for the shadow looks whether it was cancelled."""


class ShadowStart:
    """Brings the shadow up beside the first prefill, which needs no predictions."""

    def __init__(self, join: Callable[[], None]) -> None:
        self._join = join
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="shadow-start", daemon=True)
        self._begun = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        with self._lock:
            if not self._begun:
                self._begun = True
                self._thread.start()

    def _run(self) -> None:
        try:
            self._join()
        except Exception as error:  # noqa: BLE001 - as where a stream is read: it ends, and both ends hear of it
            self._error = error

    def wait(self, deadline_s: float, given_up: threading.Event | None = None) -> None:
        """Until the shadow has joined, or `given_up` is set. Raises LaunchError."""
        self.begin()
        end = time.monotonic() + deadline_s
        while self._thread.is_alive() and time.monotonic() < end:
            if given_up is not None and given_up.is_set():
                return
            self._thread.join(min(LOOK_S, max(0.0, end - time.monotonic())))
        if self._thread.is_alive():
            raise LaunchError(f"the shadow was not ready within {deadline_s:g} s; try --shadow none")
        if self._error is not None:
            raise LaunchError(f"the shadow did not come up: {self._error}") from self._error
