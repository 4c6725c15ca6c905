"""Timed figures of README's results, in two runs an hour apart. Those of systems are with their own table."""

from __future__ import annotations

from collections.abc import Callable

from scripts.doc_tables.table import Rows, Table
from scripts.lib.tables import markdown
from scripts.lib.timing.intervals import Interval
from scripts.peers.figures import CAPPED, FITS

PEERS, DRAFTS, KILLS = (f"{of} {of}-run2".split() for of in ("peers", "drafts", "kills"))
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

    def both(files: list[str], values: Callable[[Rows], list[float]]) -> list[list[float]]:
        return [values(rows_of[file]) for file in files]

    return {
        "decoding over llama.cpp's, a quarter in memory": both(
            PEERS, lambda rows: over_peer(rows, "llama.cpp", CAPPED)
        ),
        "decoding over accelerate's, a quarter in memory": both(
            PEERS, lambda rows: over_peer(rows, "accelerate", CAPPED)
        ),
        "decoding over Transformers', everything in memory": both(
            PEERS, lambda rows: over_peer(rows, "Transformers eager", FITS)
        ),
        "`--draft auto` over every expert in memory": both(DRAFTS, drafted),
    }


def pauses(rows_of: dict[str, Rows]) -> dict[str, list[float]]:
    """What is shown -> seconds in each run."""
    return {
        "longest pause when a worker is killed, s": [pause(rows_of[file], "longest_gap_s") for file in KILLS],
        "the same answers undisturbed, s": [pause(rows_of[file], "longest_gap_calm_s") for file in KILLS],
    }


def by_file(rows: Rows) -> dict[str, Rows]:
    return {file: [row for row in rows if row["file"] == file] for file in FILES}


def table(rows: Rows) -> str:
    """In Markdown: a line a figure, a column a run."""
    lines = [["figure", "run 1", "run 2", "stated"]]
    for name, runs in ratios(by_file(rows)).items():
        lines.append([name, *(str(Interval.of(run)) for run in runs), str(Interval.over_runs(runs))])
    for name, seconds in pauses(by_file(rows)).items():
        lines.append([name, *(f"{one:.2f}" for one in seconds), f"{max(seconds):.2f} at most"])
    return markdown(lines)


TABLES = {"readme": Table(" ".join(FILES), table)}
"""Name -> table."""
