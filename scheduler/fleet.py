"""What each worker holds and is about to hold."""

from __future__ import annotations

import bisect
import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from scheduler.types import ExpertId, Visit


class State(enum.Enum):
    QUEUED = "queued"
    LOADING = "loading"
    RESIDENT = "resident"


@dataclass(slots=True, eq=False)
class Need:
    """One expert, wanted by one visit, on one worker.

    `confirmed`: the gate named it; until then it is a prediction. `rows`: how many rows it computes.
    `calls`: computations sent and not yet answered; `unsent`: row ranges not sent yet.
    """

    seq: int
    visit: Visit
    expert: ExpertId
    worker: int
    state: State = State.QUEUED
    slot: int = -1
    load_id: int = 0
    confirmed: bool = False
    late: bool = False
    failures: int = 0
    rows: int = 0
    unsent: list[tuple[int, int]] = field(default_factory=list)
    calls: set[int] = field(default_factory=set)

    @property
    def urgency(self) -> tuple[bool, int]:
        """Sorts what the gate has named before what is only predicted, then first come, first served."""
        return (not self.confirmed, self.seq)


@dataclass(slots=True)
class OpenVisit:
    """A visit under way. `since`: its gate, or the end of its last stall. `waiting`: named experts not loaded yet;
    `left`: not computed yet; `let_go`: predicted, but their loads failed too often."""

    needs: dict[int, Need] = field(default_factory=dict)
    let_go: set[int] = field(default_factory=set)
    since: float = 0.0
    waiting: int = 0
    left: int = 0


@dataclass(slots=True)
class Worker:
    """Slots (None: free) and the queue of needs that have no slot yet, most urgent first."""

    number: int
    slots: list[Need | None]
    queue: list[Need] = field(default_factory=list)

    def enqueue(self, need: Need) -> None:
        need.state, need.slot, need.worker = State.QUEUED, -1, self.number
        bisect.insort(self.queue, need, key=lambda n: n.urgency)

    def free_slot(self) -> int | None:
        return next((i for i, need in enumerate(self.slots) if need is None), None)

    def furthest_prediction(self) -> Need | None:
        """The need in a slot that can be put off: only predicted, and wanted last."""
        predictions = [need for need in self.slots if need is not None and not need.confirmed]
        return max(predictions, key=lambda n: n.seq, default=None)

    def needs(self) -> Iterator[Need]:
        yield from (need for need in self.slots if need is not None)
        yield from self.queue

    @property
    def confirmed(self) -> int:
        """How many experts that a gate has named are still to be computed here."""
        return sum(need.confirmed for need in self.needs())
