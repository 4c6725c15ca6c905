"""What each worker holds and is about to hold, and what for."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from scheduler.ledger import RequestLedger
from scheduler.types import ExpertId, Visit

_PREDICTED = 1 << 60
_rank = attrgetter("rank")


@dataclass(slots=True, eq=False)
class Request:
    """`reached`: (position of the pass under way, ordinal of the last layer whose gate fired in it).
    `planned`: how many layers prefill has assigned."""

    ledger: RequestLedger
    prefilling: bool = True
    reached: tuple[int, int] = (0, -1)
    planned: int = 0


@dataclass(slots=True, eq=False)
class OpenVisit:
    """A visit under way. `turn`: how many MoE layers decoding has visited before. `since`: its gate, or the end of its
    last stall. `waiting`: named experts not loaded yet; `left`: not computed yet; `let_go`: predicted, but their loads
    failed too often."""

    visit: Visit
    request: Request
    turn: int
    needs: dict[int, Need] = field(default_factory=dict)
    let_go: tuple[int, ...] = ()
    since: float = 0.0
    waiting: int = 0
    left: int = 0


@dataclass(slots=True, eq=False)
class Held:
    """An expert in a slot, or on its way there (not `loaded`). `keeps`: it stays when nobody needs it; only then can it
    serve several needs, its `users`. `ledger`: of the request that its load was begun for."""

    worker: int
    slot: int
    expert: ExpertId
    load_id: int
    keeps: bool
    ledger: RequestLedger
    users: list[Need]
    loaded: bool = False

    @property
    def wanted(self) -> int:
        """What only predictions need is wanted so soon; -1 where a gate has named it."""
        return -1 if any(need.confirmed for need in self.users) else min(need.seq for need in self.users)


@dataclass(slots=True, eq=False)
class Need:
    """One expert, wanted by one visit, on one worker; queued there while it has no `held`.

    `confirmed`: the gate named it; until then it is a prediction. `late`: no prediction had named it. `hit`: no load
    was begun for it. `rows`: how many rows it computes. `sent`: they were. `calls`: computations not yet answered.
    """

    seq: int
    opened: OpenVisit
    expert: ExpertId
    worker: int = -1
    held: Held | None = None
    confirmed: bool = False
    late: bool = False
    hit: bool = False
    failures: int = 0
    rows: int = 0
    sent: bool = False
    calls: list[int] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """Sorts what the gate has named before what is only predicted, then first come, first served."""
        return self.seq if self.confirmed else self.seq + _PREDICTED


@dataclass(slots=True, eq=False)
class Worker:
    """`slots`: None where free; `free`: their numbers, a heap. `queue`: needs that have no slot yet, most urgent first.
    `idle`: kept experts that nobody needs now. `named`: experts that a gate has named, still to be computed here."""

    number: int
    slots: list[Held | None]
    free: list[int]
    queue: list[Need] = field(default_factory=list)
    idle: dict[ExpertId, Held] = field(default_factory=dict)
    named: int = 0

    def enqueue(self, need: Need) -> None:
        queue = self.queue
        need.worker = self.number
        if not queue or queue[-1].rank < need.rank:
            queue.append(need)
        else:
            bisect.insort(queue, need, key=_rank)

    def furthest_prediction(self) -> Held | None:
        """What can be put off: in a slot, only predicted, and wanted last."""
        held = [held for held in self.slots if held is not None and held.users and held.wanted >= 0]
        return max(held, key=lambda h: h.wanted, default=None)

    def needs(self) -> Iterator[Need]:
        for held in self.slots:
            if held is not None:
                yield from held.users
        yield from self.queue
