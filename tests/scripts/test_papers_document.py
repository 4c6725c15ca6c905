"""docs/papers.md has every figure, table and algorithm of the four papers, and commands that are complete."""

from __future__ import annotations

import re

import pytest

from scripts import publish
from scripts.figures import FIGURES
from support.paths import ROOT

TEXT = (ROOT / "docs" / "papers.md").read_text()
ROMAN = {"I": 1, "II": 2}
HAS = {
    "OD-MoE": {"Fig": 10, "Table": 2, "Algorithm": 0},
    "Importance-driven expert scheduling": {"Fig": 19, "Table": 3, "Algorithm": 2},
    "SMOE": {"Fig": 15, "Table": 2, "Algorithm": 1},
    "Fate": {"Fig": 14, "Table": 3, "Algorithm": 0},
}
"""Paper -> how many of each there are."""
VERDICTS = ("reproduced", "partly", "not", "method")


def rows(paper: str) -> list[list[str]]:
    section = TEXT.split(f"\n## {paper}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| |")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if "---" not in line]


def numbers(text: str) -> set[int]:
    """`1 to 3, 5` -> 1, 2, 3, 5."""
    found: set[int] = set()
    for part in text.replace(" and ", ", ").split(", "):
        bounds = [ROMAN.get(one) or int(one) for one in part.split(" to ")]
        found |= set(range(bounds[0], bounds[-1] + 1))
    return found


@pytest.mark.parametrize("paper", HAS)
def test_every_figure_has_a_row_and_a_verdict(paper: str) -> None:
    found: dict[str, set[int]] = {"Fig": set(), "Table": set(), "Algorithm": set()}
    for row in rows(paper):
        named = re.match(r"(Fig|Table|Algorithm)s? ([\dI]+(?:(?:, | to | and )[\dI]+)*)", row[0])
        if named:
            found[named[1]] |= numbers(named[2])
        assert row[1].strip("*").startswith(VERDICTS), row[0]
        if row[1].startswith("partly"):
            assert len(row[2]) > 20, row[0]
    assert found == {kind: set(range(1, count + 1)) for kind, count in HAS[paper].items()}


COMMANDS = re.findall(r"`\.venv/bin/python -m (scripts[^`]+)`", TEXT)


def test_every_command_is_complete() -> None:
    """That of a figure, which has all its flags, or of published data."""
    published = {publish.load(path.stem)["command"] for path in publish.DATA.glob("*.json")}
    assert len(COMMANDS) > 20
    for command in COMMANDS:
        module, *names = command.split()
        if module == "scripts.figures":
            assert names, command
            assert set(names) <= set(FIGURES), command
        else:
            assert f".venv/bin/python -m {command}" in published, command


@pytest.mark.parametrize("name", sorted(set(FIGURES) & {path.stem for path in publish.DATA.glob("*.json")}))
def test_published_figures_were_measured_by_their_own_commands(name: str) -> None:
    figure = FIGURES[name]
    expected = f".venv/bin/python -m scripts.papers.{figure.script} {figure.flags} {figure.whole}"
    assert sorted(publish.load(name)["command"].split()) == sorted(expected.split())
