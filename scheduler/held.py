"""The experts that a worker holds, as ranges: how a store's file, messages and events say it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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


def flat_ranges(experts: Iterable[ExpertId]) -> tuple[int, ...]:
    """The ranges as a message has them, one after the other."""
    return tuple(number for one in ranges_of(experts) for number in one)


def ranges_from(flat: Sequence[int]) -> tuple[HeldRange, ...]:
    """The ranges of a message."""
    return tuple(HeldRange(*flat[at : at + 3]) for at in range(0, len(flat), 3))


def experts_of(ranges: Iterable[HeldRange]) -> frozenset[ExpertId]:
    return frozenset(ExpertId(layer, expert) for layer, first, last in ranges for expert in range(first, last + 1))
