"""The main node's clock: real, or emulated by a profile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from scheduler.emulation.clock import CREDIT_S, Emulation

T = TypeVar("T")


class Pace(Protocol):
    """See `MainPace`, which keeps a profile's times."""

    @property
    def emulated(self) -> str | None:
        """The profile's name."""

    def now(self) -> float: ...

    def begin_pass(self, tokens: int, first: bool) -> None: ...

    def decoded(self) -> None: ...

    def gate(self, fired: Callable[[], T]) -> T: ...

    def foreseen(self, tell: Callable[[], object], attended: bool) -> None: ...

    def answered(self) -> None: ...

    def resumed(self) -> None: ...


class RealPace:
    """Real time."""

    emulated = None

    def now(self) -> float:
        return time.monotonic()

    def begin_pass(self, tokens: int, first: bool) -> None:
        pass

    def decoded(self) -> None:
        pass

    def gate(self, fired: Callable[[], T]) -> T:
        return fired()

    def foreseen(self, tell: Callable[[], object], attended: bool) -> None:
        tell()

    def answered(self) -> None:
        pass

    def resumed(self) -> None:
        pass


class MainPace:
    """Emulated time: a layer takes `main_s` from the last answer of the layer before it, or from the start of its pass,
    to its gate.

    Work for a predictor between a gate and the last answer costs nothing: the main node would only wait. `answered` is
    called on the thread that brings an answer, everything else on the thread that runs the model; one pass at a time.
    """

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._from = self._gate = -math.inf
        self._layer_s = 0.0

    @property
    def emulated(self) -> str | None:
        """The profile's name."""
        return self._emulation.profile.name

    def now(self) -> float:
        """The calling thread's time."""
        return self._emulation.now()

    def begin_pass(self, tokens: int, first: bool) -> None:
        """The first pass of a request starts now. A later one starts at the last answer of the one before it."""
        if first:
            self._from = self._emulation.clock()
        self._layer_s = self._emulation.profile.main_s(tokens)
        self._emulation.adopt(self._from)

    def decoded(self) -> None:
        """A token exists, and the next pass is about to be announced. It starts at the last answer, or now where the
        caller has let time pass in between."""
        if self._emulation.clock() - self._from > CREDIT_S:
            self._from = self._emulation.clock()
        self._emulation.adopt(self._from)

    def gate(self, fired: Callable[[], T]) -> T:
        """The gate has fired. `fired` announces it when it is due, in order with everything else that is due; then this
        thread's time is the gate's."""
        self._gate = self._from + self._layer_s
        result = self._emulation.agenda.wait(self._gate, fired)
        self._emulation.adopt(self._gate)
        return result

    def foreseen(self, tell: Callable[[], object], attended: bool) -> None:
        """The main model has computed scores for a predictor. `tell` announces them when they are due: with the gate;
        or, where they come from the next layer's attention (`attended`), a layer's time after the last answer so far.
        """
        known = max(self._gate, self._from) + self._layer_s if attended else self._gate
        self._emulation.agenda.at(known, tell)

    def answered(self) -> None:
        """A computation has been answered."""
        self._from = max(self._from, self._emulation.now())

    def resumed(self) -> None:
        """The layer has all its answers."""
        self._emulation.adopt(self._from)
