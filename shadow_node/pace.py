"""The time of a shadow's layers: real, or at least as long as in a profile."""

from __future__ import annotations

import math
import time
from typing import Protocol

from scheduler.emulation.clock import Emulation, SerialResource


class Pace(Protocol):
    """See `ShadowPace`, which keeps a profile's times."""

    def now(self) -> float: ...

    def arrived(self) -> None: ...

    def begin_pass(self) -> None: ...

    def layer(self) -> None: ...


class RealPace:
    """No emulation."""

    def now(self) -> float:
        return time.monotonic()

    def arrived(self) -> None:
        pass

    def begin_pass(self) -> None:
        pass

    def layer(self) -> None:
        pass


class ShadowPace:
    """Emulates `shadow_layer_s` for each layer, passes one after the other."""

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._lane = SerialResource(emulation)
        self._arrived = -math.inf

    def now(self) -> float:
        """The calling thread's time."""
        return self._emulation.now()

    def arrived(self) -> None:
        """A message that may let a pass start has arrived; called on the thread that delivers it."""
        self._arrived = self._emulation.now()

    def begin_pass(self) -> None:
        """A pass begins; called on the model's thread."""
        self._lane.begin(self._arrived)

    def layer(self) -> None:
        """A layer has routed and its prediction is not sent yet; called on the model's thread."""
        self._lane.begin(self._lane.end(self._emulation.profile.shadow_layer_s))
