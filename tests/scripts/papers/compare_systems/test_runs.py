"""Runs of the same systems beside each other."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.papers.compare_systems import runs


def row(file: str, system: str, ratios: list[float], budget: int = 25) -> dict[str, Any]:
    of = {"tpot_ratio_by_prompt": ratios, "tpot_s": 0.05, "product_s": 1e-4, "read_s_per_gb": 0.5}
    return {"file": file, "system": system, "budget": budget, **of}


def around(middle: float, half: float) -> list[float]:
    return [middle - half, middle - half / 2, middle, middle, middle + half / 2, middle + half]


RUNS = [
    *(row("a", name, around(middle, 0.02)) for name, middle in (("on-demand", 1.0), ("smoe", 0.5), ("fate", 0.5))),
    *(row("b", name, around(middle, 0.02)) for name, middle in (("on-demand", 1.0), ("smoe", 0.6), ("fate", 0.5))),
    *(row("c", name, around(middle, 0.02)) for name, middle in (("on-demand", 1.0), ("smoe", 0.56), ("fate", 0.6))),
    row("a", "eap", around(0.7, 0.02)),
    *(row(file, "static", around(0.7, 0.02)) for file in "ab"),
]


def test_a_later_run_outside_of_what_the_first_two_state_is_named() -> None:
    table = runs.runs_table(RUNS, 25, 2).splitlines()
    assert table[0] == "| system | run 1 | run 2 | stated | run 3 |"
    assert "| smoe | 0.50 (0.48 to 0.52) | 0.60 (0.58 to 0.62) | 0.6 (0.5 to 0.6) | 0.56 (0.54 to 0.58) |" in table
    fate = (
        "| fate | 0.50 (0.48 to 0.52) | 0.50 (0.48 to 0.52) | 0.50 (0.48 to 0.52) | 0.60 (0.58 to 0.62) **outside** |"
    )
    assert fate in table
    assert runs.later_checks(RUNS, 25, 2) == [{"on-demand": True, "smoe": True, "fate": False}]
    assert not any("eap" in line for line in table), "a system of one run alone is not compared"
    assert table[-4].startswith("| static | ")
    assert table[-4].endswith(" | - |"), "the third run had not all of them"
    assert "| *processor: a product, µs* | 100 | 100 |  | 100 |" in table


def test_a_run_is_marked_where_others_used_the_processor() -> None:
    rows = [one | ({"tpot_others_cores": 0.3} if one["file"] == "b" else {}) for one in RUNS]
    assert any(
        "| smoe | 0.50 (0.48 to 0.52) | 0.60 (0.58 to 0.62)* |" in line
        for line in runs.runs_table(rows, 25, 2).splitlines()
    )
    assert "0.50 (0.48 to 0.52); 0.60 (0.58 to 0.62)* **differ**" in runs.ratios_table(
        [one for one in rows if one["file"] in "ab"]
    )


def test_the_runs_that_state_an_interval_lie_within_it() -> None:
    for system, medians in (("smoe", (0.5, 0.6)), ("fate", (0.5, 0.5))):
        found = runs.stated_interval(RUNS, 25, system, 2)
        assert all(median in found for median in medians)
        assert (found.low, found.high) == (pytest.approx(min(medians) - 0.02), pytest.approx(max(medians) + 0.02))
    assert 0.55 == pytest.approx(runs.stated_interval(RUNS, 25, "smoe", 2).median)


def test_runs_are_alike_where_each_median_lies_within_the_others_interval() -> None:
    assert runs.agreeing(RUNS, 25, 2) == {"on-demand": True, "smoe": False, "fate": True, "static": True}
    assert runs.agreeing(RUNS, 25, 3) == {"on-demand": True, "smoe": False, "fate": False}


def test_two_runs_differ_where_a_median_is_outside_the_others_interval() -> None:
    rows = [one for one in RUNS if one["file"] in "ab"] + [row("a", "smoe", around(0.4, 0.02), 50)]
    table = runs.ratios_table(rows).splitlines()
    assert table[0] == "| system | 25 % |", "a budget of one run alone is not compared"
    assert "| smoe | 0.50 (0.48 to 0.52); 0.60 (0.58 to 0.62) **differ** |" in table
    assert "| fate | 0.50 (0.48 to 0.52); 0.50 (0.48 to 0.52) |" in table
