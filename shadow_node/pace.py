"""The time of a shadow's layers: real, or at least as long as in a profile."""

from __future__ import annotations

import time
from typing import Protocol

from scheduler.emulation.clock import Cancellation, Emulation, SerialResource


class Pace(Protocol):
    """See `ShadowPace`, which keeps a profile's times."""

    @property
    def emulated(self) -> bool: ...

    def now(self) -> float: ...

    def take(self, at: float) -> None: ...

    def layer(self, rows: int, wait: bool) -> None: ...


class RealPace:
    """No emulation."""

    emulated = False

    def now(self) -> float:
        return time.monotonic()

    def take(self, at: float) -> None:
        pass

    def layer(self, rows: int, wait: bool) -> None:
        pass


class ShadowPace:
    """Emulates `Profile.shadow_s` for each layer, one after the other."""

    emulated = True

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._lane = SerialResource(emulation)
        self._never = Cancellation()

    def now(self) -> float:
        """The calling thread's time."""
        return self._emulation.now()

    def take(self, at: float) -> None:
        """A message that has come at `at` is taken into account; called on the model's thread."""
        self._lane.begin(at)

    def layer(self, rows: int, wait: bool) -> None:
        """A layer of `rows` rows has routed, and its predictions are not sent yet; called on the model's thread.

        `wait`: until it is over, since a message that comes before may change what follows. Otherwise it is only
        counted.
        """
        lasts_s = self._emulation.profile.shadow_s(rows)
        end = self._lane.wait(lasts_s, self._never) if wait else self._lane.end(lasts_s)
        self._lane.begin(end)
