"""How long a layer of the shadow takes: as long as it does, or at least as long as a profile says."""

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
    """Things take as long as they take."""

    def now(self) -> float:
        return time.monotonic()

    def arrived(self) -> None:
        pass

    def begin_pass(self) -> None:
        pass

    def layer(self) -> None:
        pass


class ShadowPace:
    """The shadow: `shadow_layer_s` a layer, passes one after the other."""

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._lane = SerialResource(emulation)
        self._arrived = -math.inf

    def now(self) -> float:
        """The calling thread's time."""
        return self._emulation.now()

    def arrived(self) -> None:
        """On the thread that brings a message which may let a pass start."""
        self._arrived = self._emulation.now()

    def begin_pass(self) -> None:
        """On the thread that runs the model."""
        self._lane.begin(self._arrived)

    def layer(self) -> None:
        """Likewise, when a layer has routed and before anyone is told."""
        self._lane.begin(self._lane.end(self._emulation.profile.shadow_layer_s))
