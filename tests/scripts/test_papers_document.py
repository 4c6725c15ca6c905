"""docs/papers.md has every figure, table and algorithm of the four papers, and commands that there are."""

from __future__ import annotations

import importlib.util
import re

import pytest

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


def test_every_command_is_one_of_a_script() -> None:
    named = re.findall(r"\.venv/bin/python -m (scripts[\w.]+)", TEXT)
    assert len(named) > 8
    for name in named:
        assert importlib.util.find_spec(name) is not None, name
