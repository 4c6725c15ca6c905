"""A profile's times kept on a machine that is faster: each piece of work is done for real, and counts as ended when the
profile says so.

Every end is an absolute deadline, `start + duration`, and a start is the end of the work before it. So each thread has
its own time, `now()`: that of the last deadline it kept, or of the message it received. A message carries its due time
(`odmoe.clusters.timed_streams`), and the receiver keeps it on an agenda until then: the time of the real stream and of
the real work is part of that time, not added to it. Only what decides anything waits for its moment: the end of a load,
the main node's gate, the arrival of a message. A computation or a layer of the shadow is done at once, and reported
with the time at which it counts.

Lateness is credit. A thread goes on as of its deadline, however late the machine was, and the next wait is shorter by
as much: the errors of many sleeps do not add up, and nothing is reported before its deadline. Lateness of more than
`CREDIT_S` is lost: the machine is too slow for the profile, and measured rates are lower than the profile's. `lost_s`
counts it. Measured from any moment on rates are higher by at most `CREDIT_S`.

Work lasts as in the simulator: one load at a time on a worker's link, one computation at a time on a worker or a host
place, a layer of the main node from the last answer to the gate, a layer of the shadow. Messages travel as in
`scheduler.timing.links`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from scheduler.emulation.agenda import Agenda
from scheduler.timing.profile import Profile

CREDIT_S = 0.2
"""The most by which lateness shortens later work."""


class Cancellation(threading.Event):
    """Set once: the work in flight is cancelled, as of `at`."""

    def __init__(self) -> None:
        super().__init__()
        self.at = -math.inf

    def cancel(self, at: float) -> None:
        self.at = at
        self.set()


class Emulation:
    """One process's emulated time. All nodes of a process share it, so that credit passes between them.

    `duplex`: see `scheduler.timing.links.MainLinks`. `clock`: seconds, monotonic. Thread-safe: each thread has its own
    time.
    """

    def __init__(self, profile: Profile, clock: Callable[[], float] = time.monotonic, duplex: bool = True) -> None:
        self.profile = profile
        self.clock = clock
        self.duplex = duplex
        self.agenda = Agenda(clock, self.adopt)
        self._thread = threading.local()
        self._lost = LostTime()

    @property
    def label(self) -> str:
        """The note beside each figure of a report."""
        return f"emulated: {self.profile.name}"

    def now(self) -> float:
        """This thread's time: at most `CREDIT_S` behind the clock, ahead of it after work that was done early."""
        clock = self.clock()
        at: float = getattr(self._thread, "at", clock)
        return max(at, clock - CREDIT_S)

    def go_on(self, at: float | None = None) -> float:
        """This thread goes on, as of `at` or of its own time, with what the machine begins or has done only now.
        Returns its time; what it is late by beyond the credit is lost."""
        if at is not None:
            self.adopt(at)
        now = self.now()
        self._lost.add(getattr(self._thread, "at", now), now)
        return now

    def stood_still(self, since: float, until: float) -> None:
        """Nothing could go on in between but for this machine: that is lost, credit included."""
        self._lost.add(since, until)

    @property
    def lost_s(self) -> float:
        """Seconds by which times of this process have become longer than the profile's, because the machine was late.
        What several threads lose at the same time counts once."""
        return self._lost.total_s

    def adopt(self, at: float) -> None:
        """This thread's time is `at` from now on."""
        self._thread.at = at

    def wait_until(self, due: float, cancelled: Cancellation) -> None:
        """Sleep until `due` or until the cancellation, and go on from there."""
        while (left := due - self.clock()) > 0:
            if cancelled.wait(left):
                break
        self.adopt(min(due, max(cancelled.at, self.now())) if cancelled.is_set() else due)

    def close(self) -> None:
        self.agenda.close()


class LostTime:
    """The length of all intervals together: where they overlap it counts once. They come about in the order of their
    ends; of one that comes later, only what lies after all others counts. Thread-safe."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._until = -math.inf
        self._lock = threading.Lock()

    def add(self, since: float, until: float) -> None:
        """Nothing, where `until` is not after `since`. Seconds of one clock."""
        if until <= since:
            return
        with self._lock:
            self.total_s += max(0.0, until - max(since, self._until))
            self._until = max(self._until, until)


class SerialResource:
    """A link or a processor, which does one thing at a time. Used by one thread at a time."""

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._start = self._free = -math.inf

    def begin(self, at: float) -> float:
        """Begin work that was ready at `at`, once the work before it has ended. Returns its start."""
        self._start = self._emulation.go_on(max(at, self._free))
        return self._start

    def end(self, lasts_s: float) -> float:
        """The work is done and counts as ended after `lasts_s`. Returns its end."""
        self._free = self._start + lasts_s
        self._emulation.go_on(self._free)
        return self._free

    def wait(
        self, lasts_s: float, cancelled: Cancellation, ended_s: Callable[[float], float] = lambda after_s: after_s
    ) -> float:
        """As `end`, after waiting until then or until the cancellation.

        `ended_s`: how long the work lasts that was cancelled so many seconds after its begin, at most `lasts_s`.
        """
        self._emulation.wait_until(self._start + lasts_s, cancelled)
        self._free = self._emulation.now()
        if cancelled.is_set():  # it counts as ended later, as in `end`; the thread need not wait until then
            self._free = self._start + ended_s(self._free - self._start)
            self._emulation.adopt(self._free)
        else:
            self._emulation.go_on()
        return self._free
