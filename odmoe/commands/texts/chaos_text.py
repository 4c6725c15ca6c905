"""What `odmoe chaos` found, as text of at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from odmoe.terminal import aligned

if TYPE_CHECKING:
    from odmoe.chaos.referee import Cost, Verdict

WIDTH = 80
HEADER = ("fault", "count", "pause s", "worst s", "whole after s", "errors")


def as_text(verdict: Verdict) -> str:
    """A line for each kind of fault, then what the nodes hold, then the verdict."""
    faults = sum(cost.count for cost in verdict.costs)
    lines = aligned([HEADER, *map(_row, verdict.costs)], right=range(1, len(HEADER))) if verdict.costs else []
    named = ", ".join(f"{count} {name}" for name, count in sorted(verdict.errors.items())) or "none"
    lines += [
        "",
        f"{faults} faults in {verdict.seconds:.0f} s; {verdict.requests} requests, {verdict.tokens} tokens",
        f"requests that ended with an error: {named}",
        f"clients that left: {verdict.left}; wrong requests, refused: {verdict.refused}",
        *_at_the_end(verdict),
        "",
    ]
    if verdict.interrupted:
        lines += [*textwrap.wrap(f"Interrupted: {verdict.interrupted}.", WIDTH)]
    if not verdict.violations:
        return "\n".join([*lines, "Held: every token as without faults, or an error with a name."]).lstrip("\n")
    broken = [line for one in verdict.violations for line in textwrap.wrap(f"- {one}", WIDTH, subsequent_indent="  ")]
    return "\n".join([*lines, f"NOT held, {len(verdict.violations)} violations:", *broken]).lstrip("\n")


def _at_the_end(verdict: Verdict) -> list[str]:
    if verdict.speed is None:
        return ["the end was not compared with the start"]
    return [
        f"speed at the end over the start: {verdict.speed:.2f}",
        "at the end over the start: memory, threads, descriptors",
        *(f"  {name:<12} {_numbers(held.values())}" for name, held in verdict.usage.items()),
    ]


def _numbers(values: Iterable[float]) -> str:
    return "  ".join(f"{value:.2f}" for value in values)


def _row(cost: Cost) -> tuple[str, ...]:
    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    times = (seconds(cost.pause_s), seconds(cost.worst_s), f"{cost.back_s:.1f}")
    return (cost.fault, str(cost.count), *times, str(cost.errors))
