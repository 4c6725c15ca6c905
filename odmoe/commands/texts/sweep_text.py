"""A comparison of systems as tables, on standard output."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.table import Table

from odmoe.api.simulation.sweep import Point


def show(points: Sequence[Point], profile: str) -> None:
    """One place of load, host and batch as a table of systems and memories; of several, who wins at each."""
    console = Console(highlight=False, soft_wrap=True)
    if len({_place(one) for one in points}) > 1:
        console.print(f"simulated: {profile}", markup=False)
        console.print(_winners(points))
        return
    console.print(_title(points[0], profile), markup=False)
    speed = "decoding, tokens/s (*: fastest)"
    console.print(_by_memory(speed, points, lambda one: f"{one.tokens_per_s:.2f}", best=True))
    if any(one.misses_a_token is not None for one in points):
        console.print(_by_memory("misses a token (of them by policy)", points, _misses))


def _place(point: Point) -> tuple[float, float | None, int]:
    return point.load_ms, point.host_ms, point.batch


def _title(point: Point, profile: str) -> str:
    host = "" if point.host_ms is None else f", {point.host_ms:g} ms an expert on the host"
    several = f"{point.batch} requests at once" if point.batch > 1 else "one request at a time"
    return f"simulated: {profile}, {point.load_ms:g} ms a load{host}, {several}"


def _misses(point: Point) -> str:
    if point.misses_a_token is None:
        return "-"
    return f"{point.misses_a_token:.1f} ({point.policy_misses_a_token:.1f})"


def _by_memory(title: str, points: Sequence[Point], text: Callable[[Point], str], best: bool = False) -> Table:
    """`best`: mark the fastest of each memory that can be built."""
    memories = list(dict.fromkeys(one.device_memory for one in points))
    table = Table(box=None, padding=(0, 1), header_style="")
    table.add_column(f" {title}")
    for memory in memories:
        table.add_column(memory, justify="right")
    fastest = {memory: _winner(one for one in points if one.device_memory == memory) for memory in memories}
    for system in dict.fromkeys(one.system for one in points):
        own = {one.device_memory: one for one in points if one.system == system}
        first = next(iter(own.values()))
        label = f" {system}{' (bound)' if first.bound else '' if first.exact else ' (approximate)'}"
        cells = [text(own[memory]) + (" *" if best and own[memory] is fastest[memory] else "  ") for memory in memories]
        table.add_row(label, *cells)
    return table


def _winner(points: Iterable[Point]) -> Point | None:
    """The fastest that is no bound."""
    return max((one for one in points if not one.bound), key=lambda one: one.tokens_per_s, default=None)


def _winners(points: Sequence[Point]) -> Table:
    """A row for each place: the fastest system, and the next one. ~: its answers are approximate."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
    for name in ("load ms", "host ms", "memory", "batch", "fastest", "tokens/s", "faster", "than"):
        table.add_column(name, justify="left" if name in ("fastest", "than") else "right", overflow="fold")

    def key(one: Point) -> tuple[float, float, float, int]:
        return one.load_ms, one.host_ms or 0.0, float(one.device_memory.strip().rstrip("%")), one.batch

    for _, group in itertools.groupby(sorted(points, key=key), key):
        ranked = sorted((one for one in group if not one.bound), key=lambda one: -one.tokens_per_s)
        if not ranked:
            continue
        first, others = ranked[0], ranked[1:]
        cells = [f"{first.load_ms:.3g}", "-" if first.host_ms is None else f"{first.host_ms:.3g}", first.device_memory]
        cells += [str(first.batch), first.system + ("" if first.exact else " ~"), f"{first.tokens_per_s:.2f}"]
        cells += [f"{first.tokens_per_s / others[0].tokens_per_s - 1:.0%}", others[0].system] if others else ["", ""]
        table.add_row(*cells)
    return table
