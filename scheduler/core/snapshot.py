"""What a core holds at one moment, as plain data: for tests, traces and debugging."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from scheduler.core.state import Audit, State, Worker
from scheduler.types import ExpertId, Visit


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """One worker, or host place."""

    slots: tuple[ExpertId | None, ...]
    """The expert in each; None where free."""
    free: tuple[int, ...]
    """Numbers of the free slots."""
    loading: tuple[ExpertId, ...]
    """In flight on its link, in the order of the commands; an audit's last."""
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
    audits: tuple[int, ...] = ()
    """Under way. Their computations and loads are among `calls` and `loads`."""
    shortfall: str | None = None
    """What is missing, while open requests wait for workers."""
    waiting: tuple[ExpertId, ...] = ()
    """Needed by visits, and without a worker until the shortfall is over, or until another suspect's trial is."""
    unheld: tuple[ExpertId, ...] = ()
    """Needed by visits, and held by no worker."""
    workers: dict[int, WorkerSnapshot] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        """Nothing is under way; experts may stay in slots, or be on their way there."""
        busy = any(one.queued or one.hosted or one.needed or one.backlog for one in self.workers.values())
        return not (busy or self.requests or self.visits or self.calls or self.waiting or self.unheld or self.audits)


def snapshot(state: State) -> CoreSnapshot:
    return CoreSnapshot(
        requests=tuple(state.requests),
        visits=tuple(state.visits),
        calls=(*state.calls, *state.audits),
        loads=(*state.loads, *(audit.entry.load_id for audit in state.audits.values() if audit.loading)),
        audits=tuple(audit.number for audit in state.audits.values()),
        shortfall=state.shortfall,
        waiting=waiting_experts(state),
        unheld=tuple(demand.expert for demand in state.unheld.values()),
        workers={number: _worker(worker, state.audits.values()) for number, worker in state.workers.items()},
    )


def waiting_experts(state: State) -> tuple[ExpertId, ...]:
    """Needed by visits, and without a worker."""
    return tuple(demand.expert for demand in state.waiting.values())


def _worker(worker: Worker, audits: Collection[Audit]) -> WorkerSnapshot:
    loading = [audit.entry for audit in audits if audit.loading and audit.entry.worker == worker.number]
    return WorkerSnapshot(
        slots=tuple(entry.expert if entry is not None else None for entry in worker.slots),
        free=tuple(sorted(worker.free)),
        loading=tuple(entry.expert for entry in (*worker.link, *loading)),
        kept=frozenset(worker.idle),
        queued=tuple(demand.expert for demand in worker.queue),
        hosted=tuple(demand.expert for demand in worker.hosted.values()),
        needed=tuple(demand.expert for demand in worker.demands()),
        backlog=worker.backlog,
    )
