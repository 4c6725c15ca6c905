"""Progress: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time

import pytest

from odmoe import terminal
from odmoe.terminal import Terminal
from support.machines.cli import Screen


class Clock:
    """Seconds that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(terminal.time, "monotonic", found.monotonic)
    return found


def lines(clock: Clock, beats: list[tuple[float, int, int]], monkeypatch: pytest.MonkeyPatch, quiet: bool) -> list[str]:
    """What is printed on a pipe; each beat is (seconds since the last one, done, total)."""
    monkeypatch.setattr(sys, "stderr", err := Screen())
    with Terminal(quiet=quiet).progress("opening") as move:
        for seconds, done, total in beats:
            clock.now += seconds
            move("int4", done, total)
    return err.text().splitlines()


def test_a_pipe_gets_a_line_now_and_then(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first beat says what was there already; the rate is that of the rest."""
    beats = [(0, 20, 100), *[(2.0, 20 + n, 100) for n in range(1, 13)], (600.0, 40, 100), (11.0, 100, 100)]
    assert lines(clock, beats, monkeypatch, quiet=False) == [
        "quantising to int4: 25%, about 150 s left",
        "quantising to int4: 30%, about 140 s left",
        "quantising to int4: 40%, about 31 min left",
    ]
    assert lines(clock, beats, monkeypatch, quiet=True) == []


def test_short_work_says_nothing_on_a_pipe(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines(clock, [(0, 0, 9), (9.0, 5, 9), (0.5, 9, 9)], monkeypatch, quiet=False) == []


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", err := Screen(tty=True))
    monkeypatch.setenv("TERM", "xterm")
    with Terminal().progress() as move:
        move("int2", 1, 4)
        move("int2", 2, 4)
    assert "quantising to int2" in err.text()
    assert "left" not in err.text()


def spoken(err: Screen, count: int) -> list[str]:
    """The lines so far, once there are `count`, or after ten seconds."""
    end = time.monotonic() + 10
    while err.text().count("\n") < count and time.monotonic() < end:
        time.sleep(0.01)
    return err.text().splitlines()


def test_a_pipe_gets_a_line_now_and_then_of_what_has_no_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the seconds so far: a start of half a minute is not silent."""
    monkeypatch.setattr(terminal, "LINE_S", 0.05)
    monkeypatch.setattr(sys, "stderr", err := Screen())
    with Terminal().status("starting Ray") as say:
        assert spoken(err, 1)[0] == "starting Ray (0 s so far)"
        say("starting the shadow")
        assert spoken(err, len(spoken(err, 0)) + 2)[-1] == "starting the shadow (0 s so far)"
    before = err.text()
    time.sleep(0.2)
    assert err.text() == before, "nothing after its end"


def test_a_pipe_gets_a_line_of_a_task_that_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "LINE_S", 0.05)
    monkeypatch.setattr(sys, "stderr", err := Screen())
    with Terminal().progress("opening the model") as move:
        assert spoken(err, 1)[0] == "opening the model (0 s so far)"
        move("int4", 0, 9)
        before = err.text()
        time.sleep(0.2)
        assert err.text() == before


def test_quiet_has_no_such_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "LINE_S", 0.01)
    monkeypatch.setattr(sys, "stderr", err := Screen())
    with Terminal(quiet=True).status():
        time.sleep(0.1)
    assert err.text() == ""
