"""Timed figures of README's results, in several runs. Those of systems are with their own table."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import NamedTuple

from scripts.doc_tables.table import Rows, Table
from scripts.lib.tables import markdown
from scripts.lib.timing.idleness import mark
from scripts.lib.timing.intervals import Interval
from scripts.papers.compare_systems.runs import OUTSIDE, are_alike
from scripts.peers.figures import CAPPED, FITS

STATED_RUNS = 2
"""The first so many state README's intervals; the rest are to lie within them."""
PEERS = ["peers", "peers-run2", "peers-run3", "peers-run4"]
DRAFTS = ["drafts-auto", "drafts-auto-run2"]
KILLS = ["kills", "kills-run2", "kills-run3"]
FILES = [*PEERS, *DRAFTS, *KILLS]


class Run(NamedTuple):
    """A ratio in one run."""

    turns: list[float]
    others_cores: float | None
    """That others used in a turn, at most. None: not measured."""

    @property
    def interval(self) -> Interval:
        return Interval.of(self.turns)

    def __str__(self) -> str:
        return f"{self.interval}{mark(self.others_cores)}"


def over_peer(rows: Rows, peer: str, case: str) -> Run:
    """How many times a peer's decoding this engine's is, turn by turn."""
    [found] = [row for row in rows if row["case"] == case and f"decode over {peer}" in row and row.get("exact")]
    ratio = found[f"decode over {peer}"]
    return Run(ratio["turns"], ratio.get("others_cores"))


def drafted(rows: Rows) -> Run:
    """Decoding with `--draft auto` over that with every expert in memory, turn by turn."""
    speeds = {(row["case"], row["turn"]): row["tokens_per_s"] for row in rows}
    turns = [speed / speeds["fully cached", turn] for (case, turn), speed in speeds.items() if case == "auto"]
    return Run(turns, max(row["others_cores"] for row in rows))


def pause(rows: Rows, name: str) -> float:
    """The longest between two tokens while a worker was killed, seconds."""
    return max(float(row[name]) for row in rows if row["killed"].startswith("worker"))


def ratios(rows_of: dict[str, Rows]) -> dict[str, list[Run]]:
    """What is shown -> its runs."""

    def each(files: list[str], run: Callable[[Rows], Run]) -> list[Run]:
        return [run(rows_of[file]) for file in files]

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


def stated(runs: list[Run]) -> Interval:
    """What README states of a ratio."""
    return Interval.over_runs(run.turns for run in runs[:STATED_RUNS])


def later(runs: list[Run]) -> list[tuple[Run, bool]]:
    """The runs after those that are stated: whether the median lies within."""
    return [(run, run.interval.median in stated(runs)) for run in runs[STATED_RUNS:]]


def alike(runs: list[Run]) -> bool:
    """Whether the median of each stated run lies within the own interval of the other."""
    return are_alike([run.interval for run in runs[:STATED_RUNS]])


def table(rows: Rows) -> str:
    """In Markdown: a line a figure, a column a run; behind what the first ones state, those that are to lie within."""
    rows_of = {file: [row for row in rows if row["file"] == file] for file in FILES}
    lines = []
    for name, runs in ratios(rows_of).items():
        first = [str(run) for run in runs[:STATED_RUNS]]
        after = [f"{run}{'' if within else OUTSIDE}" for run, within in later(runs)]
        lines.append([name, *first, str(stated(runs)), *after])
    for name, seconds in pauses(rows_of).items():
        texts = [f"{one:.2f}" for one in seconds]
        lines.append([name, *texts[:STATED_RUNS], f"{max(seconds):.2f} at most", *texts[STATED_RUNS:]])
    heads = [f"run {number + 1}" for number in range(max(map(len, (PEERS, DRAFTS, KILLS))))]
    head = ["figure", *heads[:STATED_RUNS], "stated", *heads[STATED_RUNS:]]
    columns = zip_longest(head, *lines, fillvalue="-")
    return markdown([list(line) for line in zip(*columns, strict=True)])


TABLES = {"readme": Table(" ".join(FILES), table)}
"""Name -> table."""
