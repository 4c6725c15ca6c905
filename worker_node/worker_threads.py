"""Threads that a worker uses beside its own."""

from __future__ import annotations

from dataclasses import dataclass

from wire.lent_threads import LentThreads


@dataclass(frozen=True, slots=True)
class WorkerThreads:
    """Threads beside the worker's own."""

    lent: LentThreads | None = None
    """The main model's, if they are in this process. They compute the experts in slots while they wait."""
    restoring: int = 1
    """How many restore an expert together, on a CPU."""
