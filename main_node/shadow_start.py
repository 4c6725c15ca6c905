"""Starts the shadow beside the first prefill."""

from __future__ import annotations

from collections.abc import Callable

from scheduler.errors import LaunchError
from wire import runtime

LOOK_S = 0.1
"""Time between two checks whether a waiting answer was cancelled."""


class ShadowStart:
    """Starts the shadow in a thread, beside the first prefill: it needs no predictions."""

    def __init__(self, join: Callable[[], None]) -> None:
        """`join`: starts the shadow and connects it to the main node."""
        self._join = join
        self._error: Exception | None = None
        self._thread = runtime.Thread(target=self._run, name="shadow-start", daemon=True)
        self._begun = False
        self._lock = runtime.Lock()

    def begin(self) -> None:
        """Start, the first time."""
        with self._lock:
            if not self._begun:
                self._begun = True
                self._thread.start()

    def _run(self) -> None:
        try:
            self._join()
        except Exception as error:  # noqa: BLE001 - raised by `wait`, in the thread that needs the shadow
            self._error = error

    def wait(self, deadline_s: float, given_up: runtime.Event | None = None) -> None:
        """Wait until the shadow has joined or `given_up` is set. Raises LaunchError."""
        self.begin()
        end = runtime.monotonic() + deadline_s
        while self._thread.is_alive() and runtime.monotonic() < end:
            if given_up is not None and given_up.is_set():
                return
            self._thread.join(min(LOOK_S, max(0.0, end - runtime.monotonic())))
        if self._thread.is_alive():
            raise LaunchError(f"the shadow was not ready within {deadline_s:g} s; try --shadow none")
        if self._error is not None:
            raise LaunchError(f"the shadow did not start: {self._error}") from self._error
