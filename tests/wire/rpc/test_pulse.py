"""When a silent peer counts as lost, in wake-ups of a clock that is set by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from wire.rpc.pulse import PULSE, Monitor

BEAT = PULSE.beat_s


class Wakes:
    """In the place of an event that is waited for: wakes up after as long as it is told to, then is set.

    `heard`: at which wake-up something arrives, and how many bytes that announces.
    """

    def __init__(self, lasts: list[float], heard: dict[int, int]) -> None:
        self.monitor: Monitor
        self.at, self.count = 0.0, 0
        self._lasts, self._heard = lasts, heard

    def wait(self, timeout: float) -> bool:
        assert timeout == BEAT
        if self.count == len(self._lasts):
            return True
        self.at += self._lasts[self.count]
        self.count += 1
        if self.count in self._heard:
            self.monitor.hear(self._heard[self.count])
        return False


class Inline:
    """In the place of a thread: runs where it is started."""

    def __init__(self, target: Callable[[], None], **_: object) -> None:
        self.start = target


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch):
    """(how long each wait lasts, at which wake-up what is heard) -> when the peer was lost; beats sent.

    The peer counts as heard until the first wake-up.
    """

    def run(lasts: list[float], heard: dict[int, int] | None = None) -> tuple[float | None, int]:
        lost, beats = [], []
        wakes = Wakes(lasts, heard or {})
        clock = SimpleNamespace(monotonic=lambda: wakes.at, Event=lambda: wakes, Thread=Inline)
        monkeypatch.setattr("wire.rpc.pulse.runtime", clock)
        wakes.monitor = Monitor(PULSE, lambda: beats.append(1), lambda: lost.append(wakes.at))
        wakes.monitor.start()
        assert len(lost) <= 1
        return (lost[0] if lost else None), len(beats)

    return run


def test_lost_within_a_second_and_a_half_of_the_last_message(watch):
    for last in range(1, 5):  # heard just before this wake-up: at the earliest a beat before
        when, _ = watch([BEAT] * 100, {last: 0})
        assert when is not None
        assert when - (last - 1) * BEAT <= 1.5
        assert when - last * BEAT >= PULSE.lost_after_s


def test_a_peer_that_beats_is_never_lost(watch):
    when, beats = watch([BEAT] * 200, dict.fromkeys(range(2, 200, 2), 0))
    assert when is None
    assert beats == 200  # nothing else was said here


def test_a_silence_that_ends_in_time_is_forgiven(watch):
    longest = int(PULSE.lost_after_s / BEAT)  # wake-ups from one message to the next
    assert watch([BEAT] * 200, dict.fromkeys(range(1, 200, longest), 0))[0] is None
    assert watch([BEAT] * 200, dict.fromkeys(range(1, 200, longest + 1), 0))[0] is not None


@pytest.mark.parametrize("stop", [2.0, 3600.0])
def test_time_in_which_this_process_got_no_turn_is_not_silence(watch, stop):
    when, _ = watch([BEAT, stop, BEAT, stop] * 5, {})
    assert when is None
    when, _ = watch([BEAT, stop] + [BEAT] * 20, {})
    assert when == pytest.approx(BEAT + stop + PULSE.lost_after_s)


def test_a_large_message_may_take_what_the_slowest_link_takes(watch):
    when, _ = watch([BEAT] * 200, {1: 10_000_000})
    assert when == pytest.approx(BEAT + PULSE.lost_after_s + 8, abs=BEAT)
