"""Heartbeats: how a stream distinguishes a dead or frozen peer from one that is busy or far away."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from wire import runtime


class Pulse(NamedTuple):
    """Each end sends a `Beat` after `beat_s` without a message. A peer silent for `lost_after_s` is lost.

    A peer whose link goes down is lost at most `lost_after_s` + `beat_s` = 1.5 s after its last message arrived.

    A message is a sign of life once it has arrived whole. One larger than `announced_bytes` is therefore announced by a
    `Beat` with its size, and may take as long as a link of `slowest_link` bytes/s needs: at 10 Mbit/s 0.84 s for 1 MB,
    54 s for 64 MB. A smaller one takes at most 0.21 s there, and a peer sends something at least every 2 x `beat_s` =
    0.25 s. A live peer is thus taken for dead only if its process gets no turn for 0.9 s, waiting for a core or for the
    interpreter lock.
    """

    beat_s: float = 0.125
    lost_after_s: float = 1.375
    announced_bytes: int = 256 * 1024
    slowest_link: float = 1.25e6


PULSE = Pulse()


class Monitor:
    """Measures one peer's silence and triggers our beats: a thread that wakes every `beat_s` from `start` to `stop`.

    Silence is counted in wake-ups, not by the clock. A wake-up that is late by half a beat does not count: a process
    that was stopped, or got no turn on a busy machine, has not listened. Nor does time in the handler, since nothing is
    read meanwhile.
    """

    def __init__(self, pulse: Pulse, beat: Callable[[], object], lost: Callable[[], object]) -> None:
        """`beat` is called if nothing was sent since the last wake-up, `lost` once, when the peer is lost."""
        self.busy = False  # the handler has a message in hand
        self.sent_since_wakeup = False  # something was sent since the last wake-up
        self._heard = True  # something has arrived since the last wake-up
        self._pulse = pulse
        self._beat, self._lost = beat, lost
        self._grace_s = 0.0
        self._stopped = runtime.Event()

    def start(self) -> None:
        runtime.Thread(target=self._run, name="odmoe-beat", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def hear(self, coming: int = 0) -> None:
        """A message has arrived. `coming`: announced bytes of the next one, which may take the slowest link's time."""
        self._heard = True
        self._grace_s = coming / self._pulse.slowest_link

    def _run(self) -> None:
        beat_s, silent_s, woke = self._pulse.beat_s, 0.0, runtime.monotonic()
        while not self._stopped.wait(beat_s):
            before, woke = woke, runtime.monotonic()
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
