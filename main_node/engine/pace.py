"""How long a layer of the main node takes: as long as it does, or at least as long as a profile says."""

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
    """Things take as long as they take."""

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
    """The main node: `main_s` from the last answer to a layer, or the start of a pass, to the next gate.

    What it computes for a predictor, between a gate and the last answer, holds up nothing: it would have to wait.
    `answered` on the thread that brings it, all else on the thread that runs the model; one pass at a time.
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
        """A pass right after another of its request goes on from that one's last answer; the first starts now."""
        if first:
            self._from = self._emulation.clock()
        self._layer_s = self._emulation.profile.main_s(tokens)
        self._emulation.adopt(self._from)

    def decoded(self) -> None:
        """A token is there and the next pass is about to be announced: it follows the last answer, or starts now where
        whoever asked let time pass."""
        if self._emulation.clock() - self._from > CREDIT_S:
            self._from = self._emulation.clock()
        self._emulation.adopt(self._from)

    def gate(self, fired: Callable[[], T]) -> T:
        """The gate has fired, and nobody has been told: `fired` tells, in its turn among all that happens. This thread
        goes on from the gate: what it says next, it says no earlier."""
        self._gate = self._from + self._layer_s
        told = self._emulation.agenda.wait(self._gate, fired)
        self._emulation.adopt(self._gate)
        return told

    def foreseen(self, tell: Callable[[], object], attended: bool) -> None:
        """What the main model has computed for a predictor is there: `tell` tells, in its turn among all that happens.

        With the gate; or, where the next layer was `attended` on what the resident experts have answered, after the
        last answer so far by as much as a layer of the main node lasts.
        """
        known = max(self._gate, self._from) + self._layer_s if attended else self._gate
        self._emulation.agenda.at(known, tell)

    def answered(self) -> None:
        """On the thread that brings it: a computation's answer is there."""
        self._from = max(self._from, self._emulation.now())

    def resumed(self) -> None:
        """The layer has all its answers, and what follows has not begun."""
        self._emulation.adopt(self._from)
