"""Timed figures of README's results, in several runs. Those of systems are with their own table."""

from __future__ import annotations

from collections.abc import Callable

from scripts.doc_tables.table import Rows, Table
from scripts.lib.tables import markdown
from scripts.lib.timing.intervals import Interval
from scripts.papers.compare_systems.runs import outside
from scripts.peers.figures import CAPPED, FITS

STATED_RUNS = 2
"""The first so many state README's intervals; the rest are to lie within them."""
PEERS, DRAFTS, KILLS = (f"{of} {of}-run2 {of}-run3".split() for of in ("peers", "drafts", "kills"))
FILES = [*PEERS, *DRAFTS, *KILLS]


def over_peer(rows: Rows, peer: str, case: str) -> list[float]:
    """How many times a peer's decoding this engine's is, turn by turn."""
    [found] = [row for row in rows if row["case"] == case and f"decode over {peer}" in row and row.get("exact")]
    turns: list[float] = found[f"decode over {peer}"]["turns"]
    return turns


def drafted(rows: Rows) -> list[float]:
    """Decoding with `--draft auto` over that with every expert in memory, turn by turn."""
    speeds = {(row["case"], row["turn"]): row["tokens_per_s"] for row in rows}
    return [speed / speeds["fully cached", turn] for (case, turn), speed in speeds.items() if case == "auto"]


def pause(rows: Rows, name: str) -> float:
    """The longest between two tokens while a worker was killed, seconds."""
    return max(float(row[name]) for row in rows if row["killed"].startswith("worker"))


def ratios(rows_of: dict[str, Rows]) -> dict[str, list[list[float]]]:
    """What is shown -> its values in each run."""

    def each(files: list[str], values: Callable[[Rows], list[float]]) -> list[list[float]]:
        return [values(rows_of[file]) for file in files]

    return {
        "decoding over llama.cpp's, a quarter in memory": each(
            PEERS, lambda rows: over_peer(rows, "llama.cpp", CAPPED)
        ),
        "decoding over accelerate's, a quarter in memory": each(
            PEERS, lambda rows: over_peer(rows, "accelerate", CAPPED)
        ),
        "decoding over Transformers', everything in memory": each(
            PEERS, lambda rows: over_peer(rows, "Transformers eager", FITS)
        ),
        "`--draft auto` over every expert in memory": each(DRAFTS, drafted),
    }


def pauses(rows_of: dict[str, Rows]) -> dict[str, list[float]]:
    """What is shown -> seconds in each run. README states the longest of all."""
    return {
        "longest pause when a worker is killed, s": [pause(rows_of[file], "longest_gap_s") for file in KILLS],
        "the same answers undisturbed, s": [pause(rows_of[file], "longest_gap_calm_s") for file in KILLS],
    }


def by_file(rows: Rows) -> dict[str, Rows]:
    return {file: [row for row in rows if row["file"] == file] for file in FILES}


def stated(runs: list[list[float]]) -> Interval:
    """What README states of a ratio's runs."""
    return Interval.over_runs(runs[:STATED_RUNS])


def table(rows: Rows) -> str:
    """In Markdown: a line a figure, a column a run; behind what the first ones state, those that are to lie within."""
    heads = [f"run {number + 1}" for number in range(len(PEERS))]
    lines = [["figure", *heads[:STATED_RUNS], "stated", *heads[STATED_RUNS:]]]
    for name, runs in ratios(by_file(rows)).items():
        later = [outside(Interval.of(run), stated(runs)) for run in runs[STATED_RUNS:]]
        lines.append([name, *(str(Interval.of(run)) for run in runs[:STATED_RUNS]), str(stated(runs)), *later])
    for name, seconds in pauses(by_file(rows)).items():
        texts = [f"{one:.2f}" for one in seconds]
        lines.append([name, *texts[:STATED_RUNS], f"{max(seconds):.2f} at most", *texts[STATED_RUNS:]])
    return markdown(lines)


def kept(rows_of: dict[str, Rows]) -> dict[str, bool]:
    """Each ratio: whether the medians of its later runs lie within what README states."""
    return {
        name: all(Interval.of(run).median in stated(runs) for run in runs[STATED_RUNS:])
        for name, runs in ratios(rows_of).items()
    }


TABLES = {"readme": Table(" ".join(FILES), table)}
"""Name -> table."""
