"""What each worker holds and is about to hold, and what for."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from scheduler.core.stats import RequestLedger
from scheduler.policies.demand import Wants
from scheduler.policies.precision import FULL, PREDICTED, Wanted
from scheduler.types import ExpertId, Visit

_PREDICTED, _ERRAND = 1 << 60, 1 << 61
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
    failed too often. `errand`: nothing is computed for it; its experts are only to be brought into slots. `wants`: how
    much each expert is wanted, where anybody asks."""

    visit: Visit
    request: Request
    turn: int
    needs: dict[int, Need] = field(default_factory=dict)
    let_go: tuple[int, ...] = ()
    since: float = 0.0
    waiting: int = 0
    left: int = 0
    errand: bool = False
    wants: Wants | None = None


@dataclass(slots=True, eq=False)
class Held:
    """An expert in a slot, or on its way there (not `loaded`), in a form. `keeps`: it stays when nobody needs it; only
    then can it serve several needs, its `users`. `ledger`: of the request that its load was begun for. `hosted`: not in
    a slot, but at a host place, where it lies."""

    worker: int
    slot: int
    expert: ExpertId
    load_id: int
    keeps: bool
    ledger: RequestLedger
    users: list[Need]
    form: str = FULL
    loaded: bool = False
    hosted: bool = False

    @property
    def urgent(self) -> bool:
        """A gate has named it."""
        return any(need.confirmed for need in self.users)

    @property
    def wanted(self) -> int:
        """What only predictions need is wanted so soon; -1 where a gate has named it."""
        return -1 if self.urgent else min(need.rank for need in self.users)


@dataclass(slots=True, eq=False)
class Need:
    """One expert, wanted by one visit, on one worker; queued there while it has no `held`.

    `confirmed`: the gate named it; until then it is a prediction. `late`: no prediction had named it. `hit`: no load
    was begun for it. `rows`: how many rows it computes. `sent`: they were. `calls`: computations not yet answered.
    `wanted`: how much, for the choice of a form.
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
    wanted: Wanted = PREDICTED

    @property
    def rank(self) -> int:
        """Sorts what the gate has named before what is only predicted, that before errands, then first come, first
        served."""
        return self.seq if self.confirmed else self.seq + (_ERRAND if self.opened.errand else _PREDICTED)


@dataclass(slots=True, eq=False)
class Worker:
    """`slots`: None where free; `free`: their numbers, a heap. `queue`: needs that have no slot yet, most urgent first.
    `idle`: kept experts that nobody needs now. `named`: experts that a gate has named, still to be computed here.
    `loading`: what is on the link or waits for it, in the order of asking. A host place has no slots; `hosted`: what it
    computes."""

    number: int
    slots: list[Held | None]
    free: list[int]
    queue: list[Need] = field(default_factory=list)
    idle: dict[ExpertId, Held] = field(default_factory=dict)
    named: int = 0
    loading: list[Held] = field(default_factory=list)
    hosted: dict[int, Held] = field(default_factory=dict)

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
        for held in self.hosted.values():
            yield from held.users
        yield from self.queue
