"""Pictures of traces that were written by hand, looked at pixel by pixel."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scheduler.errors import ConfigError
from scheduler.trace import read_trace
from scripts.papers import timeline
from support.machines.cli import CommandLine

RED, BLUE, GREEN = (0xD6, 0x45, 0x45), (0x3B, 0x6E, 0xA5), (0x3F, 0x9B, 0x6C)


def event(row: int, what: str, start: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": what, "name": f"{what} 0.1", "pid": row, "ts": start * 1e3, "dur": (end - start) * 1e3}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two tokens after the prompt's, of 100 ms. In the first the main node computes for 100 ms and its stall is 50 to
    75 ms; the worker computes for 20 ms."""
    names = ("main", "worker 0")
    rows = [{"ph": "M", "name": "process_name", "pid": n, "args": {"name": name}} for n, name in enumerate(names)]
    tokens = [event(0, "token", start, start + 100) for start in (0, 100, 200)]
    inside = [event(0, "layer", 100, 200), event(0, "stall", 150, 175), event(1, "compute", 120, 140)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [*rows, *tokens, *inside], "otherData": {"cluster": "by hand"}}))
    return path


def columns(picture: Path, colour: tuple[int, int, int]) -> tuple[int, int]:
    """The longest run of one colour in any row of pixels: its first column, and the one behind its last."""
    from matplotlib.image import imread

    pixels = np.rint(imread(picture)[:, :, :3] * 255).astype(int)
    found = np.abs(pixels - colour).max(axis=2) <= 2
    edges = np.diff(np.pad(found, ((0, 0), (1, 1))).astype(int), axis=1)
    runs = [run for row in edges for run in zip(np.flatnonzero(row == 1), np.flatnonzero(row == -1), strict=True)]
    first, last = max(runs, key=lambda run: run[1] - run[0])
    return int(first), int(last)


def drawn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    monkeypatch.setattr(sys, "argv", [str(timeline.__file__), *flags])
    timeline.main()
    return capsys.readouterr().out


def test_bars_are_where_and_as_long_as_the_spans(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = drawn(monkeypatch, capsys, str(trace), "--token", "0")
    picture = trace.with_suffix(".png")
    assert told.startswith(f"{picture}: by hand, ")
    assert "stalls for loads 25.0 ms" in told
    left, right = columns(picture, BLUE)
    width = right - left
    assert width > 800
    for colour, start, end in ((RED, 0.5, 0.75), (GREEN, 0.2, 0.4)):
        first, last = columns(picture, colour)
        assert (first - left) / width == pytest.approx(start, abs=0.01)
        assert (last - left) / width == pytest.approx(end, abs=0.01)


def test_several_tokens_share_the_width(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "two.png"
    drawn(monkeypatch, capsys, str(trace), "--token", "0", "--tokens", "2", "--output", str(picture))
    drawn(monkeypatch, capsys, str(trace), "--token", "0")
    one, two = columns(trace.with_suffix(".png"), BLUE), columns(picture, BLUE)
    assert (two[1] - two[0]) / (one[1] - one[0]) == pytest.approx(0.5, abs=0.02)


@pytest.mark.slow
def test_a_simulation_can_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "simulated.json"
    assert CommandLine()("simulate", "--tokens", "4", "--trace", str(file), "-q").code == 0
    drawn(monkeypatch, capsys, str(file))
    assert (tmp_path / "simulated.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--token", "2"), ["no decoded token 2", "--token: 0 to 1"]),
        (("--token", "1", "--tokens", "2"), ["2 decoded tokens", "for --tokens: 1 to 1"]),
        (("--token", "-1"), ["no decoded token -1"]),
        (("--tokens", "0"), ["'0'", "allowed: 1, 2, ..."]),
    ],
)
def test_tokens_that_the_trace_has_not_are_refused(
    trace: Path,
    flags: tuple[str, ...],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [str(timeline.__file__), str(trace), *flags])
    with pytest.raises(SystemExit) as ended:
        timeline.main()
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert all(word in told for word in words), told


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    for path, words in ((tmp_path / "missing.json", "odmoe generate --trace FILE"), (other, "is no trace of odmoe")):
        with pytest.raises(ConfigError, match=words):
            read_trace(path)
