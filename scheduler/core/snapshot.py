"""What a core holds at one moment, as plain data: for tests, traces and debugging."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.core.state import State, Worker
from scheduler.types import ExpertId, Visit


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """One worker, or host place."""

    slots: tuple[ExpertId | None, ...]
    """The expert in each; None where free."""
    free: tuple[int, ...]
    """Numbers of the free slots."""
    loading: tuple[ExpertId, ...]
    """In flight on its link, in the order of the commands."""
    kept: frozenset[ExpertId]
    """In slots, and needed by no visit."""
    queued: tuple[ExpertId, ...]
    """Waiting for a slot, most urgent first."""
    hosted: tuple[ExpertId, ...]
    """Computed at a host place."""
    needed: tuple[ExpertId, ...]
    """By visits under way, once for each."""
    backlog: int
    """Experts that gates have chosen, still to be computed here."""


@dataclass(frozen=True, slots=True)
class CoreSnapshot:
    """All of a core's state that is not a figure."""

    requests: tuple[int, ...]
    """Open ones."""
    visits: tuple[Visit, ...]
    """Under way, or predicted."""
    calls: tuple[int, ...]
    """Ids of computations that have not been answered."""
    loads: tuple[int, ...]
    """Ids of loads in flight."""
    shortfall: str | None = None
    """What is missing, while open requests wait for workers."""
    waiting: tuple[ExpertId, ...] = ()
    """Needed by visits, and without a worker until the shortfall is over."""
    workers: dict[int, WorkerSnapshot] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        """Nothing is under way; experts may stay in slots, or be on their way there."""
        busy = any(one.queued or one.hosted or one.needed or one.backlog for one in self.workers.values())
        return not (busy or self.requests or self.visits or self.calls or self.waiting)


def snapshot(state: State) -> CoreSnapshot:
    return CoreSnapshot(
        requests=tuple(state.requests),
        visits=tuple(state.visits),
        calls=tuple(state.calls),
        loads=tuple(state.loads),
        shortfall=state.shortfall,
        waiting=tuple(demand.expert for demand in state.waiting.values()),
        workers={number: _worker(worker) for number, worker in state.workers.items()},
    )


def _worker(worker: Worker) -> WorkerSnapshot:
    return WorkerSnapshot(
        slots=tuple(entry.expert if entry is not None else None for entry in worker.slots),
        free=tuple(sorted(worker.free)),
        loading=tuple(entry.expert for entry in worker.link),
        kept=frozenset(worker.idle),
        queued=tuple(demand.expert for demand in worker.queue),
        hosted=tuple(demand.expert for demand in worker.hosted.values()),
        needed=tuple(demand.expert for demand in worker.demands()),
        backlog=worker.backlog,
    )
