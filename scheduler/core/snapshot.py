"""What a core holds at one moment, as plain data: for tests, traces and whoever debugs."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.core.state import Worker
from scheduler.types import ExpertId, Visit


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """One worker. `slots`: the expert in each, None where free. `free`: the
    numbers of free slots. `loading`: on its link, in the order of asking. `kept`:
    in slots, and needed by nobody now. `queued`: waiting for a slot, most urgent first. `hosted`: computed at a host
    place. `needed`: by visits under way, once for each. `named`: how many experts gates have named, still to be
    computed here."""

    slots: tuple[ExpertId | None, ...]
    free: tuple[int, ...]
    loading: tuple[ExpertId, ...]
    kept: frozenset[ExpertId]
    queued: tuple[ExpertId, ...]
    hosted: tuple[ExpertId, ...]
    needed: tuple[ExpertId, ...]
    named: int


@dataclass(frozen=True, slots=True)
class CoreSnapshot:
    """`requests`: open ones. `visits`: under way, or predicted. `calls`: ids of computations not answered. `loads`: ids
    of those under way. `held_back`: visits whose rows wait to be sent together."""

    requests: tuple[int, ...]
    visits: tuple[Visit, ...]
    calls: tuple[int, ...]
    loads: tuple[int, ...]
    held_back: tuple[Visit, ...]
    workers: dict[int, WorkerSnapshot] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        """Nobody waits for anything; experts may stay in slots, or be on their way there."""
        busy = any(one.queued or one.hosted or one.needed or one.named for one in self.workers.values())
        return not (busy or self.requests or self.visits or self.calls or self.held_back)


def worker_snapshot(worker: Worker) -> WorkerSnapshot:
    return WorkerSnapshot(
        slots=tuple(held.expert if held is not None else None for held in worker.slots),
        free=tuple(sorted(worker.free)),
        loading=tuple(held.expert for held in worker.loading),
        kept=frozenset(worker.idle),
        queued=tuple(demand.expert for demand in worker.queue),
        hosted=tuple(held.expert for held in worker.hosted.values()),
        needed=tuple(demand.expert for demand in worker.demands()),
        named=worker.named,
    )
