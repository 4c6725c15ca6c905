"""When a silent peer counts as lost, in wake-ups of a clock that is set by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from wire.rpc.pulse import PULSE, Monitor

BEAT = PULSE.beat_s


class Wakes:
    """In the place of an event that is waited for: wakes up after as long as it is told to, then is set."""

    def __init__(self, monitor: Monitor, lasts: list[float], heard: dict[int, int]) -> None:
        self.at, self.count = 0.0, 0
        self._monitor, self._lasts, self._heard = monitor, lasts, heard

    def wait(self, timeout: float) -> bool:
        if self.count == len(self._lasts):
            return True
        self.at += self._lasts[self.count]
        self.count += 1
        if self.count in self._heard:
            self._monitor.hear(self._heard[self.count])
        return False


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch):
    """(how long each wait lasts, at which wake-up what is heard) -> when the peer was lost; beats sent."""

    def run(lasts: list[float], heard: dict[int, int] | None = None) -> tuple[float | None, int]:
        lost, beats = [], []
        monitor = Monitor(PULSE, lambda: beats.append(1), lambda: lost.append(wakes.at))
        monitor._heard = False
        wakes = Wakes(monitor, lasts, heard or {})
        monitor._stopped = wakes
        monkeypatch.setattr("wire.rpc.pulse.time", SimpleNamespace(monotonic=lambda: wakes.at))
        monitor._run()
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


@pytest.mark.parametrize("stop", [2.0, 3600.0])
def test_time_in_which_this_process_got_no_turn_is_not_silence(watch, stop):
    when, _ = watch([BEAT, stop, BEAT, stop] * 5, {})
    assert when is None
    when, _ = watch([BEAT, stop] + [BEAT] * 20, {})
    assert when == pytest.approx(stop + PULSE.lost_after_s)


def test_a_large_message_may_take_what_the_slowest_link_takes(watch):
    when, _ = watch([BEAT] * 200, {1: 10_000_000})
    assert when == pytest.approx(BEAT + PULSE.lost_after_s + 8, abs=BEAT)
