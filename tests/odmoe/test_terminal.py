"""Progress: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys

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
