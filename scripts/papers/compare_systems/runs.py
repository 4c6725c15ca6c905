"""Several runs of the same systems beside each other: what repeats, and how fast the machine was in each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scripts.lib.tables import markdown
from scripts.lib.timing.intervals import Interval

Rows = Sequence[dict[str, Any]]
"""Of several runs, in their order; `file`: of which one a row is."""
MACHINE = (
    ("*on-demand, ms a token*", "tpot_s", 1e3, ".1f"),
    ("*processor: a product, µs*", "product_s", 1e6, ".0f"),
    ("*disk: a gigabyte of experts, s*", "read_s_per_gb", 1.0, ".2f"),
)
"""Of on-demand's answers, which lie between all others'."""


def files_of(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["file"] for row in rows))


def ratios(rows: Rows) -> dict[tuple[str, int, str], list[float]]:
    """By file, budget and system: those of TPOT to on-demand's, one a prompt."""
    return {
        (row["file"], row["budget"], row["system"]): row["tpot_ratio_by_prompt"]
        for row in rows
        if row.get("tpot_ratio_by_prompt")
    }


def stated(rows: Rows, budget: int, system: str, runs: int) -> Interval:
    """What the docs state: over the first `runs` of them."""
    found = ratios(rows)
    return Interval.over_runs(found[file, budget, system] for file in files_of(rows)[:runs])


def checked(rows: Rows, budget: int, runs: int) -> list[dict[str, bool]]:
    """Of each run after the first `runs`, its systems: whether the median lies within what those state."""
    files, found = files_of(rows), ratios(rows)
    return [
        {
            system: Interval.of(found[file, budget, system]).median in stated(rows, budget, system, runs)
            for system in stated_systems(rows, budget, runs)
            if (file, budget, system) in found
        }
        for file in files[runs:]
    ]


def alike(rows: Rows, budget: int, runs: int) -> dict[str, bool]:
    """Each system: whether the median of each of the first `runs` lies within the own interval of each other one."""
    files, found = files_of(rows)[:runs], ratios(rows)
    return {
        system: _alike([Interval.of(found[file, budget, system]) for file in files])
        for system in stated_systems(rows, budget, runs)
    }


def _alike(of: list[Interval]) -> bool:
    return all(one.median in other for one in of for other in of)


def stated_systems(rows: Rows, budget: int, runs: int) -> list[str]:
    """Those that each of the first `runs` has."""
    found = ratios(rows)
    names = dict.fromkeys(system for _, of, system in found if of == budget)
    return [name for name in names if all((file, budget, name) in found for file in files_of(rows)[:runs])]


def repeated(rows: Rows, budget: int, runs: int) -> str:
    """In Markdown: each system's ratio in the first `runs`, what they state together, and the runs after them, which
    are to lie within; beneath, how fast the machine was."""
    files, found = files_of(rows), ratios(rows)
    heads = [f"run {number + 1}" for number in range(len(files))]
    lines = [["system", *heads[:runs], "stated", *heads[runs:]]]
    for system in stated_systems(rows, budget, runs):
        whole = stated(rows, budget, system, runs)
        line = [str(Interval.of(found[file, budget, system])) for file in files[:runs]]
        later = [found.get((file, budget, system)) for file in files[runs:]]
        cells = ("-" if of is None else outside(Interval.of(of), whole) for of in later)
        lines.append([system, *line, str(whole), *cells])
    by_file = {row["file"]: row for row in rows if (row["system"], row["budget"]) == ("on-demand", budget)}
    for head, name, scale, form in MACHINE:
        known = [by_file[file].get(name) for file in files]
        texts = ["-" if one is None else f"{scale * one:{form}}" for one in known]
        lines.append([head, *texts[:runs], "", *texts[runs:]])
    return markdown(lines)


def outside(found: Interval, whole: Interval) -> str:
    """A cell: marked where the median is not within what is stated."""
    return f"{found}{'' if found.median in whole else ' **outside**'}"


def beside(rows: Rows) -> str:
    """In Markdown: the ratios of two runs beside each other, by system and each budget that both have, and those that
    differ: a median that is outside the other run's interval."""
    files, found = files_of(rows), ratios(rows)
    budgets = list(dict.fromkeys(budget for _, budget, _ in found))
    budgets = [one for one in budgets if {file for file, budget, _ in found if budget == one} == set(files)]
    lines = [["system", *(f"{budget} %" for budget in budgets)]]
    for system in dict.fromkeys(name for _, _, name in found):
        line = [system]
        for budget in budgets:
            of = [Interval.of(found[file, budget, system]) for file in files if (file, budget, system) in found]
            line.append("; ".join(map(str, of)) + ("" if _alike(of) else " **differ**"))
        lines.append(line)
    return markdown(lines)
