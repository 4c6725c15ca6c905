"""The time of a shadow's layers: real, or at least as long as in a profile."""

from __future__ import annotations

from typing import Protocol

from scheduler.emulation.clock import Cancellation, Emulation, SerialResource
from wire import runtime


class Pace(Protocol):
    """See `ShadowPace`, which keeps a profile's times."""

    @property
    def is_emulated(self) -> bool: ...

    @property
    def main_layer_s(self) -> float: ...

    def now(self) -> float: ...

    def take(self, at: float) -> None: ...

    def layer(self, rows: int, undisturbed_until: float) -> None: ...


class RealPace:
    """No emulation."""

    is_emulated = False
    main_layer_s = 0.0

    def now(self) -> float:
        return runtime.monotonic()

    def take(self, at: float) -> None:
        pass

    def layer(self, rows: int, undisturbed_until: float) -> None:
        pass


class ShadowPace:
    """Emulates `Profile.shadow_s` for each layer, one after the other."""

    is_emulated = True

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._lane = SerialResource(emulation)
        self._never = Cancellation()

    def now(self) -> float:
        """The calling thread's time."""
        return self._emulation.now()

    @property
    def main_layer_s(self) -> float:
        """The main model takes at least as long for each layer."""
        return self._emulation.profile.main_layer_s

    def take(self, at: float) -> None:
        """A message that has come at `at` is taken into account; called on the model's thread."""
        self._lane.begin(at)

    def layer(self, rows: int, undisturbed_until: float) -> None:
        """A layer of `rows` rows has routed, and its predictions are not sent yet; called on the model's thread.

        It is only counted, except after `undisturbed_until`: then a message may come that changes what follows, and the
        layer is over no sooner than in emulated time.
        """
        lasts_s = self._emulation.profile.shadow_s(rows)
        surely = self._emulation.now() + lasts_s <= undisturbed_until
        self._lane.begin(self._lane.end(lasts_s) if surely else self._lane.wait(lasts_s, self._never))
