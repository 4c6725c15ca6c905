"""Several runs of the same systems beside each other: what repeats, and how fast the machine was in each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scripts.lib.tables import markdown
from scripts.lib.timing.idleness import mark
from scripts.lib.timing.intervals import Interval

Rows = Sequence[dict[str, Any]]
"""Of several runs, in their order; `file`: of which one a row is."""
MACHINE = (
    ("*on-demand, ms a token*", "tpot_s", 1e3, ".1f"),
    ("*processor: a product, µs*", "product_s", 1e6, ".0f"),
    ("*disk: a gigabyte of experts, s*", "read_s_per_gb", 1.0, ".2f"),
)
"""Of on-demand's answers, which lie between all others'."""
OUTSIDE = " **outside**"


def files_of(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["file"] for row in rows))


def ratios(rows: Rows) -> dict[tuple[str, int, str], list[float]]:
    """By file, budget and system: those of TPOT to on-demand's, one a prompt."""
    return {
        (row["file"], row["budget"], row["system"]): row["tpot_ratio_by_prompt"]
        for row in rows
        if row.get("tpot_ratio_by_prompt")
    }


def stated_interval(rows: Rows, budget: int, system: str, runs: int) -> Interval:
    """What the docs state: over the first `runs` of them."""
    found = ratios(rows)
    return Interval.over_runs(found[file, budget, system] for file in files_of(rows)[:runs])


def later_checks(rows: Rows, budget: int, runs: int) -> list[dict[str, bool]]:
    """Of each run after the first `runs`, its systems: whether the median lies within what those state."""
    files, found = files_of(rows), ratios(rows)
    return [
        {
            system: Interval.of(found[file, budget, system]).median in stated_interval(rows, budget, system, runs)
            for system in stated_systems(rows, budget, runs)
            if (file, budget, system) in found
        }
        for file in files[runs:]
    ]


def agreeing(rows: Rows, budget: int, runs: int) -> dict[str, bool]:
    """Each system: whether the median of each of the first `runs` lies within the own interval of each other one."""
    files, found = files_of(rows)[:runs], ratios(rows)
    return {
        system: are_alike([Interval.of(found[file, budget, system]) for file in files])
        for system in stated_systems(rows, budget, runs)
    }


def are_alike(of: list[Interval]) -> bool:
    """Whether each median lies within each other interval."""
    return all(one.median in other for one in of for other in of)


def stated_systems(rows: Rows, budget: int, runs: int) -> list[str]:
    """Those that each of the first `runs` has."""
    found = ratios(rows)
    names = dict.fromkeys(system for _, of, system in found if of == budget)
    return [name for name in names if all((file, budget, name) in found for file in files_of(rows)[:runs])]


def runs_table(rows: Rows, budget: int, runs: int) -> str:
    """In Markdown: each system's ratio in the first `runs`, what they state together, and the runs after them, which
    are to lie within; beneath, how fast the machine was."""
    files = files_of(rows)
    heads = [f"run {number + 1}" for number in range(len(files))]
    lines = [["system", *heads[:runs], "stated", *heads[runs:]]]
    of = {(row["file"], row["system"]): row for row in rows if row["budget"] == budget}
    for system in stated_systems(rows, budget, runs):
        whole = stated_interval(rows, budget, system, runs)
        first = [cell(of.get((file, system)), "tpot") for file in files[:runs]]
        lines.append(
            [system, *first, str(whole), *(cell(of.get((file, system)), "tpot", whole) for file in files[runs:])]
        )
    for head, name, scale, form in MACHINE:
        known = [of[file, "on-demand"].get(name) for file in files]
        texts = ["-" if one is None else f"{scale * one:{form}}" for one in known]
        lines.append([head, *texts[:runs], "", *texts[runs:]])
    return markdown(lines)


def cell(row: dict[str, Any] | None, short: str, whole: Interval | None = None) -> str:
    """The ratio of a row's time (`short`: tpot or ttft) with its interval, marked if others used the processor
    meanwhile, and if the median is not within the `whole`."""
    if row is None or not row.get(f"{short}_ratio_by_prompt"):
        return "-"
    found, busy = Interval.of(row[f"{short}_ratio_by_prompt"]), mark(row.get(f"{short}_others_cores"))
    return f"{found}{busy}{'' if whole is None or found.median in whole else OUTSIDE}"


def ratios_table(rows: Rows, short: str = "tpot", across: str = "budget", head: str = "{} %") -> str:
    """In Markdown: the ratios of two runs beside each other, by system and each budget that both have, and those that
    differ: a median that is outside the other run's interval. `across`: a field in place of the budget."""
    found = {(row["file"], row[across], row["system"]): row for row in rows if row.get(f"{short}_ratio_by_prompt")}
    files = files_of(rows)
    columns = list(dict.fromkeys(of for _, of, _ in found))
    columns = [one for one in columns if {file for file, of, _ in found if of == one} == set(files)]
    lines = [["system", *(head.format(of) for of in columns)]]
    for system in dict.fromkeys(name for _, _, name in found):
        line = [system]
        for of in columns:
            both = [found.get((file, of, system)) for file in files]
            same = are_alike([Interval.of(row[f"{short}_ratio_by_prompt"]) for row in both if row is not None])
            line.append("; ".join(cell(row, short) for row in both) + ("" if same else " **differ**"))
        lines.append(line)
    return markdown(lines)
