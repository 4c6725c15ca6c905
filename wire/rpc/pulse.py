"""How a stream tells a dead or frozen peer from one that is busy, or far away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple


class Pulse(NamedTuple):
    """Both ends send a `Beat` where they said nothing for `beat_s`; a peer silent for `lost_after_s` is lost.

    A peer whose link goes down is lost at most `lost_after_s` + `beat_s` = 1.5 s after its last message came.

    Whatever arrives is a sign of life, but only when it has arrived whole. So a message larger than `announced_bytes`
    is announced by a `Beat` that says its size, and may then take as long as a link of `slowest_link` bytes a second
    needs: on 10 Mbit/s a message of 1 MB takes 0.84 s, one of 64 MB 54 s. What is smaller takes at most 0.21 s there,
    and a peer speaks at least every 2 x `beat_s` = 0.25 s; so a live one is silent for so long only where its process
    gets no turn for 0.9 s: a Python thread that must wait for a core, or for the interpreter lock.
    """

    beat_s: float = 0.125
    lost_after_s: float = 1.375
    announced_bytes: int = 256 * 1024
    slowest_link: float = 1.25e6


PULSE = Pulse()


class Monitor:
    """Counts one peer's silence, and says when to speak: a thread that wakes up each `beat_s`, from `start` to `stop`.

    Silence is counted in wake-ups, not by the clock, and those that come late by half a beat do not count: a process
    that was itself stopped, or got no turn on a busy machine, has not listened. Time that the handler takes with a
    message does not count either, since nothing is read meanwhile.
    """

    def __init__(self, pulse: Pulse, beat: Callable[[], object], lost: Callable[[], object]) -> None:
        """`beat` is called where nothing was sent since the last wake-up, `lost` once when the peer is silent."""
        self.busy = False  # the handler has a message in hand
        self.sent_since_wakeup = False  # something was sent since the last wake-up
        self._heard = True  # something has arrived since the last wake-up
        self._pulse = pulse
        self._beat, self._lost = beat, lost
        self._grace_s = 0.0
        self._stopped = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="odmoe-beat", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def hear(self, coming: int = 0) -> None:
        """A message has arrived. `coming`: the next one has so many bytes, and may take what the slowest link takes."""
        self._heard = True
        self._grace_s = coming / self._pulse.slowest_link

    def _run(self) -> None:
        beat_s, silent_s, woke = self._pulse.beat_s, 0.0, time.monotonic()
        while not self._stopped.wait(beat_s):
            before, woke = woke, time.monotonic()
            if self._heard or self.busy:
                self._heard = False
                silent_s = 0.0
            elif woke - before < 1.5 * beat_s:
                silent_s += beat_s
            if silent_s >= self._pulse.lost_after_s + self._grace_s:
                self._lost()
                return
            if not self.sent_since_wakeup:
                self._beat()
            self.sent_since_wakeup = False
