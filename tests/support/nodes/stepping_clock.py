"""A clock for emulated loads that moves by what is waited for: a profile's times are kept exactly, and at once."""

from __future__ import annotations

import pytest

from scheduler.emulation.clock import Cancellation


class SteppingClock:
    """Seconds, for `Emulation(profile, clock)`. One load at a time: each wait for one moves it on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.at = 100.0
        patch.setattr(Cancellation, "wait", lambda cancelled, timeout: self._wait(cancelled, timeout))

    def __call__(self) -> float:
        return self.at

    def _wait(self, cancelled: Cancellation, timeout: float) -> bool:
        if not cancelled.is_set():
            self.at += timeout
        return cancelled.is_set()
