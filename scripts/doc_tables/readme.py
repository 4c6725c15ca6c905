"""Timed figures of README's results, in several runs. Those of systems are with their own table."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from scripts.doc_tables.table import Rows, Table
from scripts.lib.tables import markdown
from scripts.lib.timing.idleness import mark
from scripts.lib.timing.intervals import Interval
from scripts.papers.compare_systems.runs import OUTSIDE, are_alike
from scripts.peers.figures import CAPPED, FITS

STATED_RUNS = 2
"""The first so many state an interval of README; the rest are to lie within it."""
PEERS = ["peers", "peers-run2", "peers-run3", "peers-run4"]
DRAFTS = ["drafts-auto"]
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


class Ratio(NamedTuple):
    runs: list[Run]

    @property
    def stated(self) -> Interval:
        """What README states."""
        return Interval.over_runs(run.turns for run in self.runs[:STATED_RUNS])

    @property
    def later(self) -> list[tuple[Run, bool]]:
        """The runs after those that are stated: whether the median lies within."""
        return [(run, run.interval.median in self.stated) for run in self.runs[STATED_RUNS:]]

    @property
    def is_alike(self) -> bool:
        """Whether the median of each stated run lies within the own interval of each other."""
        return are_alike([run.interval for run in self.runs[:STATED_RUNS]])


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
    """Seconds, the longest between two tokens: of answers during which a worker was killed, or undisturbed."""
    return max(float(row[name]) for row in rows if row["killed"].startswith("worker"))


def ratios(rows_of: dict[str, Rows]) -> dict[str, Ratio]:
    """What is shown -> its runs."""

    def each(files: list[str], run: Callable[[Rows], Run]) -> Ratio:
        return Ratio([run(rows_of[file]) for file in files])

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


def table(rows: Rows) -> str:
    """In Markdown: a line a figure, a column a run, and last what README states."""
    rows_of = {file: [row for row in rows if row["file"] == file] for file in FILES}
    most = max(map(len, (PEERS, DRAFTS, KILLS)))
    lines = [["figure", *(f"run {number + 1}" for number in range(most)), "stated"]]
    for name, ratio in ratios(rows_of).items():
        first = [str(run) for run in ratio.runs[:STATED_RUNS]]
        after = [f"{run}{'' if within else OUTSIDE}" for run, within in ratio.later]
        lines.append([name, *_filled([*first, *after], most), str(ratio.stated)])
    for name, seconds in pauses(rows_of).items():
        lines.append([name, *_filled([f"{one:.2f}" for one in seconds], most), f"{max(seconds):.2f} at most"])
    return markdown(lines)


def _filled(texts: list[str], count: int) -> list[str]:
    return [*texts, *["-"] * (count - len(texts))]


TABLES = {"readme": Table(" ".join(FILES), table)}
"""Name -> table."""
