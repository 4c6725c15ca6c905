"""The experts that a worker holds, as ranges: how a store's file, messages and events say it."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.types import ExpertId, HeldRange


def ranges_of(experts: Iterable[ExpertId]) -> tuple[HeldRange, ...]:
    """As few ranges as there can be, ascending."""
    found: list[HeldRange] = []
    for layer, expert in sorted(set(experts)):
        if found and found[-1].layer == layer and found[-1].last == expert - 1:
            found[-1] = found[-1]._replace(last=expert)
        else:
            found.append(HeldRange(layer, expert, expert))
    return tuple(found)


def experts_of(ranges: Iterable[HeldRange]) -> frozenset[ExpertId]:
    return frozenset(ExpertId(layer, expert) for layer, first, last in ranges for expert in range(first, last + 1))
