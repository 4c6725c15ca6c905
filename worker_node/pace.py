"""How long a worker's work takes: as long as it does, or at least as long as a profile says."""

from __future__ import annotations

import time
from typing import Protocol

from scheduler.emulation.clock import Emulation, GivenUp, SerialResource


class Pace(Protocol):
    """Times are seconds on one clock. Loads begin and end on one thread, computations on another, or the same."""

    @property
    def costs(self) -> tuple[float, float] | None:
        """What a computation takes by a profile: seconds a call, and a row of it. None: it is to be measured."""

    def now(self) -> float:
        """When what this thread is told happens."""

    def begin_load(self, at: float) -> float:
        """A load that could begin from `at` on is taken up; when that is."""

    def end_load(self, given_up: GivenUp, share: float = 1.0) -> float:
        """Its bytes have moved, or it was given up; when it ends. `share`: of the bytes that the full form has."""

    def begin_compute(self, at: float) -> float:
        """As for a load."""

    def end_compute(self, rows: int) -> float:
        """The output of so many rows is there; when that counts."""


class RealPace:
    """Things take as long as they take."""

    costs: tuple[float, float] | None = None

    def now(self) -> float:
        return time.monotonic()

    def begin_load(self, at: float) -> float:
        return time.monotonic()

    def end_load(self, given_up: GivenUp, share: float = 1.0) -> float:
        return time.monotonic()

    def begin_compute(self, at: float) -> float:
        return time.monotonic()

    def end_compute(self, rows: int) -> float:
        return time.monotonic()


class EmulatedPace:
    """A load lasts at least the profile's `load_s`, of a smaller form as much less as its bytes are fewer; a
    computation at least its `compute_s`; a load that is given up ends at once.

    `host`: the place is the host's processor beside the device: a computation lasts the profile's `host_compute_s`.
    Raises ConfigError where the profile has no such times.
    """

    def __init__(self, emulation: Emulation, host: bool = False) -> None:
        profile = emulation.profile
        self.costs: tuple[float, float] | None = profile.host_costs if host else profile.device_costs
        self._emulation = emulation
        self._host = host
        self._link, self._processor = SerialResource(emulation), SerialResource(emulation)

    def now(self) -> float:
        return self._emulation.now()

    def begin_load(self, at: float) -> float:
        return self._link.begin(at)

    def end_load(self, given_up: GivenUp, share: float = 1.0) -> float:
        return self._link.wait(share * self._emulation.profile.load_s, given_up)

    def begin_compute(self, at: float) -> float:
        return self._processor.begin(at)

    def end_compute(self, rows: int) -> float:
        profile = self._emulation.profile
        return self._processor.end(profile.host_compute_s(rows) if self._host else profile.compute_s(rows))
