"""A profile's times kept on a machine that is faster than they are: each piece of work is done for real, and counts as
ended when the profile says so.

Every end is an absolute deadline, `start + duration`, and a start is the end of what came before. So a thread has a
time of its own, `now()`: that of the last deadline it kept, or of the message it was brought. A message says when it is
due (`odmoe.clusters.timed_streams`), and whoever receives it keeps it until then, on an agenda: what the real stream
takes, and what the real work takes, is part of that time and not on top of it. Only what decides anything waits for its
moment: a load's end, the main node's gate, a message's arrival. A computation or a layer of the shadow is done at once,
and told with the time at which it counts.

Being late is credit: a thread goes on as of its deadline, however late the machine was, and the next wait is shorter by
as much. The errors of many sleeps do not add up, and nothing is told before its deadline. A lead of the clock of more
than `CREDIT_S` is lost: then the machine is too slow for the profile, and its figures are lower than the profile's
arithmetic. Measured from any moment on they are higher by at most `CREDIT_S`.

The pieces last as in the simulator: one load at a time on a worker's link, one computation at a time on a worker or a
host place, a layer of the main node from the last answer to the gate, a layer of the shadow; a message travels as
`scheduler.timing.links` says.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from scheduler.emulation.agenda import Agenda
from scheduler.timing.profile import Profile

CREDIT_S = 0.2
"""The most by which lateness shortens what follows."""

T = TypeVar("T")


class GivenUp(threading.Event):
    """Set once: what was under way is not wanted any more, as of `at`."""

    def __init__(self) -> None:
        super().__init__()
        self.at = -math.inf

    def give_up(self, at: float) -> None:
        self.at = at
        self.set()


class Emulation:
    """One process's emulated time. All nodes of a process must share it, so that credit passes between them.

    `duplex`: see `scheduler.timing.links.MainLinks`. `clock`: seconds, monotonic. Thread-safe: each thread has its own
    time.
    """

    def __init__(self, profile: Profile, clock: Callable[[], float] = time.monotonic, duplex: bool = True) -> None:
        self.profile = profile
        self.clock = clock
        self.duplex = duplex
        self.agenda = Agenda(clock, self.adopt)
        self._thread = threading.local()

    @property
    def label(self) -> str:
        """What a report says beside each figure."""
        return f"emulated: {self.profile.name}"

    def now(self) -> float:
        """This thread's time: behind the clock by at most `CREDIT_S`, before it where something was done early."""
        clock = self.clock()
        at: float = getattr(self._thread, "at", clock)
        return max(at, clock - CREDIT_S)

    def adopt(self, at: float) -> None:
        """This thread goes on from `at`."""
        self._thread.at = at

    def wait_until(self, due: float, given_up: GivenUp) -> None:
        """Sleep until `due`, or until it was given up, and go on from there."""
        while (left := due - self.clock()) > 0:
            if given_up.wait(left):
                break
        self.adopt(min(due, max(given_up.at, self.now())) if given_up.is_set() else due)

    def close(self) -> None:
        self.agenda.close()


class SerialResource:
    """What does one thing at a time: a link, a processor. Used by one thread at a time."""

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._start = self._free = -math.inf

    def begin(self, at: float) -> float:
        """Work that was there from `at` on is taken up, once the work before it has ended; when that was."""
        self._emulation.adopt(max(at, self._free))
        self._start = self._emulation.now()
        return self._start

    def end(self, lasts_s: float) -> float:
        """The work is done, and counts as ended after `lasts_s`; when that is."""
        self._free = self._start + lasts_s
        self._emulation.adopt(self._free)
        return self._free

    def wait(self, lasts_s: float, given_up: GivenUp) -> float:
        """As `end`, having waited for it, or until it was given up."""
        self._emulation.wait_until(self._start + lasts_s, given_up)
        self._free = self._emulation.now()
        return self._free
