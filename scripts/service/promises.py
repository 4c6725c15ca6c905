"""What must hold of each row, and what does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from scripts.service import faults
from scripts.service.load import REFUSED

COST = 1.05
"""Most of the service's time over the engine's."""
STOP_S = 0.1
"""Longest time from a client's end to the beginning of its last load."""
FLAT, FLAT_S = 0.01, 120.0
"""Memory is flat that grows by less than this share a minute; not judged of a shorter time."""
Row = dict[str, Any]


def broken(rows: Iterable[Row]) -> list[str]:
    """A line for each promise that does not hold.

    Memory under load is judged by the last rate: until oneDNN has met every shape of a product, its cache of kernels
    grows with each new one.
    """
    found = list(rows)
    faults = [f"{_NAMES[row['part']](row)}: {fault}" for row in found for fault in _FAULTS[row["part"]](row)]
    last = [row for row in found if row["part"] == "load"][-1:]
    return [*faults, *(f"{_NAMES['load'](row)}: {fault}" for row in last for fault in _memory(row))]


def _counts(row: Row, names: Iterable[str]) -> list[str]:
    """Of what must be 0."""
    return [f"{row[name]} {name.replace('_', ' ')}" for name in names if row.get(name, 0) > 0]


def _others(row: Row) -> list[str]:
    return [f"{count} clients saw: {kind}" for kind, count in row["others"].items()]


LEFT = ("requests_left", "threads_more", "files_more")


def _memory(row: Row) -> list[str]:
    grows = row["rss_growth_a_minute"] / row["rss_last"]
    if row["rss_watched_s"] < FLAT_S or grows <= FLAT:
        return []
    return [f"memory grows by {grows:.1%} a minute"]


def _load(row: Row) -> list[str]:
    return [*_counts(row, ("wrong", "stuck", "no_retry_after", *LEFT)), *_others(row)]


def _full(row: Row) -> list[str]:
    found = [*_counts(row, ("wrong", "stuck", "no_retry_after", *LEFT)), *_others(row)]
    return found if row["refused_429"] else [*found, "nobody was refused"]


def _cost(row: Row) -> list[str]:
    over = row["service_over_engine"]
    return [f"the service takes {over - 1:.1%} longer than the engine alone"] if over > COST else []


def _vanish(row: Row) -> list[str]:
    found = _counts(row, (*LEFT, "loads_in_flight", "unknown"))
    if row["mid_answer"] < row["clients"]:
        found.append(f"only {row['mid_answer']} of {row['clients']} clients left in mid-answer")
    found += [f"{count} clients saw: {kind}" for kind, count in row["others"].items() if kind != REFUSED]
    missing = row["places"] - row["places_filled"]
    if missing:
        found.append(f"{missing} of {row['places']} places cannot be taken any more")
    if (row["last_load_worst_s"] or 0.0) > STOP_S:
        found.append(f"a load began {row['last_load_worst_s']:.3f} s after its client had gone")
    return [*found, *_memory(row)]


def _fault(row: Row) -> list[str]:
    found = _counts(row, ("requests_left",))
    allowed = faults.SEES[row["case"]][row["clients"] == "late"]
    if row["saw"] not in allowed or row["tokens"] == "others":
        found.append(f"{row['count']} {row['clients']} clients saw: {row['saw']} (tokens: {row['tokens']})")
    if row["streaming_at_fault"] < faults.CLIENTS:
        found.append(f"{row['streaming_at_fault']} clients were streaming, not {faults.CLIENTS}")
    if row.get("exit_code", 0) != 0:
        found.append(f"exit code {row['exit_code']}")
    return found


_FAULTS: dict[str, Callable[[Row], list[str]]] = {
    "load": _load,
    "full queue": _full,
    "cost": _cost,
    "vanish": _vanish,
    "fault": _fault,
}
_NAMES: dict[str, Callable[[Row], str]] = {
    "load": lambda row: f"load, {row['share']:g} of what is served",
    "full queue": lambda row: "a full queue",
    "cost": lambda row: f"cost, {row['requests']} at once",
    "vanish": lambda row: f"vanish, {row['how']}",
    "fault": lambda row: row["case"],
}
