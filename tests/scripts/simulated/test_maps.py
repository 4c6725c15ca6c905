"""Pictures of comparisons: every system its own mark, the winner of each square, bounds apart."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from scripts.simulated import maps


def point(system: str, rate: float, **more: Any) -> dict[str, Any]:
    usual = {
        "device_memory": "25%",
        "load_ms": 1.0,
        "host_ms": 2.0,
        "batch": 1,
        "bound": False,
        "exact": True,
        "misses_a_token": 3.0,
    }
    return {**usual, "system": system, "tokens_per_s": rate, **more}


def test_every_system_has_a_mark_and_a_colour_of_its_own() -> None:
    style = maps.styles([point(f"system {number}", 1.0) for number in range(len(maps.MARKS))])
    assert len({mark for _, mark in style.values()}) == len({colour for colour, _ in style.values()}) == 16


def test_a_line_for_each_system_and_bounds_are_dashed() -> None:
    points = [
        point(name, rate, device_memory=memory, bound=name == "belady")
        for (name, rate), memory in itertools.product([("lru", 4.0), ("belady", 8.0)], ["10%", "25%"])
    ]
    speed, misses = maps.draw(points).axes
    assert [line.get_linestyle() for line in speed.lines] == ["-", "--"]
    assert [line.get_label() for line in speed.lines] == ["lru", "belady (bound)"]
    assert list(speed.lines[0].get_ydata()) == [4.0, 4.0]
    assert list(misses.lines[1].get_ydata()) == [3.0, 3.0]


def test_a_square_has_the_fastest_and_by_how_much() -> None:
    points = [
        point(name, rate * load, load_ms=load, bound=name == "perfect")
        for name, rate in [("lru", 4.0), ("lfu", 5.0), ("perfect", 9.0)]
        for load in (1.0, 2.0)
    ]
    figure = maps.draw(points)
    (panel,) = figure.axes
    assert [text.get_text() for text in panel.texts] == ["+25%", "+25%"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["lfu"]


def test_the_picture_lies_beside_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "map.json"
    file.write_text(json.dumps({"version": 1, "settings": {"routes": "many-moe"}, "points": [point("lru", 1.0)]}))
    maps.main([str(file)])
    assert capsys.readouterr().out.strip() == str(tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text("[]")
    with pytest.raises(SystemExit, match="is no file of odmoe simulate"):
        maps.main([str(tmp_path / "rows.json")])
