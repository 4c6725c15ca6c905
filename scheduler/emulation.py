"""A profile's times kept on a machine that is faster than they are: each piece of work is done for real, then slept out
until it has lasted as long as the profile says.

Every end is an absolute deadline, `start + duration`, and a start is the end of what came before. So a thread has a
time of its own, `now()`: that of the last deadline it kept, or of the message it was brought. It stands still while the
thread computes, decides and sends, which costs nothing here as it does in `scheduler.simulator`, and however late a
sleep wakes (0.1 ms, more where the machine is busy): the clock's lead over it is credit, used up by the next wait. The
errors of many sleeps do not add up, and nothing ends before its deadline. A lead of more than `CREDIT_S` is lost: then
the machine is too slow for the profile, and its figures are lower than the profile's arithmetic. Measured from any
moment on they are higher by at most `CREDIT_S`.

The pieces last as in the simulator: one load at a time on a worker's link, one computation at a time on a worker, a
layer of the main node from the last answer to the gate, a layer of the shadow; a message travels as long as
`wire.delayed` says.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from scheduler.profile import Profile

CREDIT_S = 0.05
"""The most by which lateness shortens what follows."""


class Emulation:
    """One process's emulated time. All nodes of a process must share it, so that credit passes between them.

    `clock` and `sleep`: seconds, of the same clock. Thread-safe: each thread has its own time.
    """

    def __init__(
        self,
        profile: Profile,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.profile = profile
        self.clock = clock
        self._sleep = sleep
        self._thread = threading.local()

    @property
    def label(self) -> str:
        """What a report says beside each figure."""
        return f"emulated: {self.profile.name}"

    def now(self) -> float:
        """This thread's time: at most the clock's, and behind it by at most `CREDIT_S`."""
        clock = self.clock()
        at: float = getattr(self._thread, "at", clock)
        return min(max(at, clock - CREDIT_S), clock)

    def adopt(self, at: float) -> None:
        """This thread goes on from `at`; a time to come counts as now."""
        self._thread.at = min(at, self.clock())

    def wait_until(self, due: float, given_up: threading.Event | None = None) -> bool:
        """Sleep until `due`, and go on from there. False when `given_up` was set before: then from this moment."""
        while (left := due - self.clock()) > 0:
            if given_up is None:
                self._sleep(left)
            elif given_up.wait(left):
                self.adopt(math.inf)
                return False
        self.adopt(due)
        return True


class Lane:
    """What does one thing at a time: a link, a processor. Used by one thread at a time."""

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._start = self._free = -math.inf

    def begin(self, at: float) -> float:
        """Work that was there from `at` on is taken up, once the work before it has ended; when that was."""
        self._emulation.adopt(max(at, self._free))
        self._start = self._emulation.now()
        return self._start

    def end(self, least_s: float, given_up: threading.Event | None = None) -> float:
        """Wait until the work has lasted `least_s`, or until `given_up` is set; when that was."""
        self._emulation.wait_until(self._start + least_s, given_up)
        self._free = self._emulation.now()
        return self._free


class MainPace:
    """The main node: at least `main_layer_s` from the last answer to a layer, or the start of a pass, to the next gate.

    All but `answered` on the thread that runs the model; one pass at a time.
    """

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._from = -math.inf

    @property
    def emulated(self) -> str | None:
        """The profile's name."""
        return self._emulation.profile.name

    def now(self) -> float:
        """The calling thread's time."""
        return self._emulation.now()

    def begin_pass(self) -> None:
        """A pass right after another goes on from that one's last answer."""
        if self._emulation.clock() - self._from > CREDIT_S:
            self._from = self._emulation.clock()
        self._emulation.adopt(self._from)

    def gate(self) -> None:
        """The gate has fired, and nobody has been told."""
        self._emulation.wait_until(self._from + self._emulation.profile.main_layer_s)

    def answered(self) -> None:
        """On the thread that brings it: a computation's answer is there."""
        self._from = max(self._from, self._emulation.now())

    def resumed(self) -> None:
        """The layer has all its answers, and what follows has not begun."""
        self._emulation.adopt(self._from)


class ShadowPace:
    """The shadow: `shadow_layer_s` a layer, passes one after the other."""

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._lane = Lane(emulation)
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
