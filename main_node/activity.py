"""What a running cluster does at the moment, as plain data: for people who watch it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from main_node.totals import Totals

HIT, IN_TIME, LATE, MISSED, HOST = range(5)
OUTCOMES = ("hit", "in time", "late", "missed", "host")
"""What a gate met: the expert was in a slot, loaded for an earlier visit; a load ahead of the gate had ended; one was
asked for, and the expert was not there yet; none of these; a host place computes it."""


class ExpertAccess(NamedTuple):
    """A gate has chosen an expert."""

    layer: int
    expert: int
    outcome: int
    """An index of `OUTCOMES`."""
    worker: int
    """That computes it; -1: none is there for it yet."""


class WorkerActivity(NamedTuple):
    """One worker, or host place. Its counters begin with the main node."""

    number: int
    is_up: int
    """1: it is connected; 0: it is lost."""
    loads: int
    load_s: float
    """Seconds that these loads took."""
    computations: int
    """That have ended, those of audits too."""
    compute_s: float
    """Seconds that these took."""


@dataclass(frozen=True, slots=True)
class Activity:
    """A cluster at one moment."""

    count: int
    """Of accesses so far; `since` of the next call."""
    accesses: tuple[ExpertAccess, ...]
    """Those after `since`, oldest first; the latest ones if there were many. On a fast cluster, those of some steps."""
    at_s: float
    """On the main node's clock, as the seconds of workers."""
    workers: tuple[WorkerActivity, ...]
    """Those that ever joined, by number."""
    predictions: int
    """Layers that the shadow has predicted since somebody began to watch."""
    totals: Totals
    answered: int = 0
    """Requests that are answered now."""
    waiting: int = 0
    """Requests that wait for one of these to end."""
