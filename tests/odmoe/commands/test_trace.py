"""`odmoe trace`: pictures of traces written by hand, looked at pixel by pixel."""

from __future__ import annotations

import errno
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.machines.cli import CommandLine, check_one_line

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


def test_bars_are_where_and_as_long_as_the_spans(cli: CommandLine, trace: Path) -> None:
    answer = cli("trace", str(trace), "--token", "0")
    assert answer.code == 0, answer.err
    picture = trace.with_suffix(".png")
    assert answer.out.startswith(f"{picture}: by hand, ")
    assert "stalls for loads 25.0 ms" in answer.out
    left, right = columns(picture, BLUE)
    width = right - left
    assert width > 800
    for colour, start, end in ((RED, 0.5, 0.75), (GREEN, 0.2, 0.4)):
        first, last = columns(picture, colour)
        assert (first - left) / width == pytest.approx(start, abs=0.01)
        assert (last - left) / width == pytest.approx(end, abs=0.01)


def test_several_tokens_share_the_width(cli: CommandLine, trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "two.png"
    assert cli("trace", str(trace), "--token", "0", "--tokens", "2", "-o", str(picture)).code == 0
    assert cli("trace", str(trace), "--token", "0").code == 0
    one, two = columns(trace.with_suffix(".png"), BLUE), columns(picture, BLUE)
    assert (two[1] - two[0]) / (one[1] - one[0]) == pytest.approx(0.5, abs=0.02)


def test_a_simulation_can_be_drawn(cli: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "simulated.json"
    assert cli("simulate", "--tokens", "4", "--trace", str(file), "-q").code == 0
    assert cli("trace", str(file)).code == 0
    assert (tmp_path / "simulated.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_is_written_whole_or_not_at_all(
    cli: CommandLine, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full after a few bytes: the picture that was there stays, and nothing else."""
    picture = trace.with_suffix(".png")
    picture.write_bytes(b"the picture before")

    class FullDisk(io.FileIO):
        def write(self, data: Any) -> int:
            super().write(bytes(data)[:4])
            raise OSError(errno.ENOSPC, "No space left on device")

    def full(path: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
        return FullDisk(path, mode) if "w" in mode else io.open_code(str(path))

    monkeypatch.setattr("builtins.open", full)
    monkeypatch.setattr(Path, "open", full)
    answer = cli("trace", str(trace))
    monkeypatch.undo()
    assert (answer.code, "No space left" in answer.err) == (1, True), answer
    assert picture.read_bytes() == b"the picture before"
    assert sorted(trace.parent.iterdir()) == sorted([trace, picture])


def test_wrong_usage_is_one_line_before_matplotlib(cli: CommandLine, trace: Path, tmp_path: Path) -> None:
    no_trace = tmp_path / "other.json"
    no_trace.write_text("{}")
    for args, words in (
        ((str(tmp_path / "missing.json"),), ["missing.json", "odmoe generate --trace FILE"]),
        ((str(no_trace),), ["is no trace of odmoe"]),
        ((str(trace), "--token", "2"), ["no decoded token 2", "--token: 0 to 1"]),
        ((str(trace), "--token", "1", "--tokens", "2"), ["2 decoded tokens", "--tokens 2", "for --tokens: 1 to 1"]),
        ((str(trace), "--tokens", "3"), ["2 decoded tokens", "--tokens 3", "for --tokens: 1 to 2"]),
        ((str(trace), "--token", "-1"), ["--token is -1", "allowed: 0, 1, ..."]),
        ((str(trace), "--tokens", "0"), ["--tokens is 0", "allowed: 1, 2, ..."]),
        ((str(trace), "-o", "picture.svg"), ["'picture.svg'", ".png"]),
        ((str(trace), "-o", str(tmp_path / "nowhere" / "a.png")), ["--output", "can be written to"]),
    ):
        check_one_line(cli("trace", *args), 2, "ConfigError", words)
