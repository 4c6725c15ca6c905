"""What a running cluster does at the moment, as plain data: for people who watch it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from main_node.totals import Totals

HIT, IN_TIME, LATE, MISSED, HOST = range(5)
OUTCOMES = ("hit", "in time", "late", "missed", "host")
"""What a gate met: the expert was kept in a slot since an earlier step; a load ahead of the gate had ended; the expert
was predicted or on its way, but not loaded yet; neither; a host place computes it."""


class ExpertAccess(NamedTuple):
    """A gate has chosen an expert."""

    layer: int
    expert: int
    outcome: int
    """An index of `OUTCOMES`."""
    worker: int
    """That holds or loads the expert, or computes it at a host place."""


class WorkerActivity(NamedTuple):
    """One worker, or host place. Its seconds and counts begin when somebody began to watch."""

    number: int
    loading: int
    """Loads in flight."""
    computing: int
    """Computations that it owes."""
    held: int
    """Slots that have an expert, or are being loaded."""
    load_s: float
    """Time with a load in flight."""
    compute_s: float
    """Time with a computation whose expert is loaded. A worker may load and compute at once."""
    loads: int
    computations: int


@dataclass(frozen=True, slots=True)
class Activity:
    """A cluster at one moment."""

    count: int
    """Of accesses so far; `since` of the next call."""
    accesses: tuple[ExpertAccess, ...]
    """Those after `since`, oldest first; the latest ones if there were many."""
    at_s: float
    """On the main node's clock, as the seconds of workers."""
    workers: tuple[WorkerActivity, ...]
    """Those that are connected, by number."""
    predictions: int
    """Layers that the shadow has predicted."""
    totals: Totals
    answered: int = 0
    """Requests that are answered now."""
    waiting: int = 0
    """Requests that wait for one of these to end."""
