"""A clock for emulated loads that moves by what is waited for: a profile's times are kept exactly, and at once."""

from __future__ import annotations

import pytest

from scheduler.emulation.clock import GivenUp


class SteppingClock:
    """Seconds, for `Emulation(profile, clock)`. One load at a time: each wait for one moves it on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.at = 100.0
        patch.setattr(GivenUp, "wait", lambda given_up, timeout: self._wait(given_up, timeout))

    def __call__(self) -> float:
        return self.at

    def _wait(self, given_up: GivenUp, timeout: float) -> bool:
        if not given_up.is_set():
            self.at += timeout
        return given_up.is_set()
