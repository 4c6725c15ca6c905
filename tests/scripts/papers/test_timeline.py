"""A picture of spans that were written by hand, looked at pixel by pixel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scheduler.trace import Span
from scripts.papers.timeline import Panel, draw_panels

RED, BLUE, GREEN = (0xD6, 0x45, 0x45), (0x3B, 0x6E, 0xA5), (0x3F, 0x9B, 0x6C)


def columns(picture: Path, colour: tuple[int, int, int]) -> tuple[int, int]:
    """The longest run of one colour in any row of pixels: its first column, and the one behind its last."""
    from matplotlib.image import imread

    pixels = np.rint(imread(picture)[:, :, :3] * 255).astype(int)
    found = np.abs(pixels - colour).max(axis=2) <= 2
    edges = np.diff(np.pad(found, ((0, 0), (1, 1))).astype(int), axis=1)
    runs = [run for row in edges for run in zip(np.flatnonzero(row == 1), np.flatnonzero(row == -1), strict=True)]
    first, last = max(runs, key=lambda run: run[1] - run[0])
    return int(first), int(last)


def test_bars_are_where_and_as_long_as_the_spans(tmp_path: Path) -> None:
    """Of 100 ms the main node computes for all, its stall is 50 to 75 ms, and the worker computes for 20."""
    spans = [
        Span("main", "layer", "0.1", 0.1, 0.2),
        Span("main", "stall", "0.1", 0.15, 0.175),
        Span("worker 0", "compute", "0.1", 0.12, 0.14),
    ]
    picture = tmp_path / "picture.png"
    draw_panels([Panel(spans, 0.1, 0.2, "by hand")], picture)
    left, right = columns(picture, BLUE)
    width = right - left
    assert width > 800
    for colour, start, end in ((RED, 0.5, 0.75), (GREEN, 0.2, 0.4)):
        first, last = columns(picture, colour)
        assert (first - left) / width == pytest.approx(start, abs=0.01)
        assert (last - left) / width == pytest.approx(end, abs=0.01)
