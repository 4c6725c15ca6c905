"""What each worker holds and is about to hold, and what for."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from scheduler.core.stats import RequestStats
from scheduler.policies.importance import LayerImportance
from scheduler.policies.precision import FULL, PREDICTED, Importance
from scheduler.types import ExpertId, Visit

_PREDICTED, _WARM_UP = 1 << 60, 1 << 61
_urgency = attrgetter("urgency")


@dataclass(slots=True, eq=False)
class Request:
    """`reached`: (position of the pass under way, ordinal of the last layer whose gate fired in it).
    `planned`: how many layers prefill has assigned."""

    stats: RequestStats
    prefilling: bool = True
    reached: tuple[int, int] = (0, -1)
    planned: int = 0


@dataclass(slots=True, eq=False)
class LayerVisit:
    """A visit under way. `turn`: how many MoE layers decoding has visited before. `since`: its gate, or the end of its
    last stall. `waiting`: named experts not loaded yet; `left`: not computed yet; `given_up`: predicted, but their
    loads failed too often. `warm_up`: nothing is computed for it; its experts are only to be brought into slots.
    `importance`: how much each expert is wanted, where anybody asks."""

    visit: Visit
    request: Request
    turn: int
    demands: dict[int, Demand] = field(default_factory=dict)
    given_up: tuple[int, ...] = ()
    since: float = 0.0
    waiting: int = 0
    left: int = 0
    warm_up: bool = False
    importance: LayerImportance | None = None


@dataclass(slots=True, eq=False)
class Residence:
    """An expert in a slot, or on its way there (not `loaded`), in a form. `keeps`: it stays when nobody needs it; only
    then can it serve several demands, its `users`. `stats`: of the request that its load was begun for. `hosted`: not
    in a slot, but at a host place, where it lies."""

    worker: int
    slot: int
    expert: ExpertId
    load_id: int
    keeps: bool
    stats: RequestStats
    users: list[Demand]
    form: str = FULL
    loaded: bool = False
    hosted: bool = False

    @property
    def urgent(self) -> bool:
        """A gate has named it."""
        return any(demand.confirmed for demand in self.users)

    @property
    def urgency(self) -> int:
        """Of the most urgent of its users, where all are predictions; -1 where a gate has named it."""
        return -1 if self.urgent else min(demand.urgency for demand in self.users)


@dataclass(slots=True, eq=False)
class Demand:
    """One expert, wanted by one visit, on one worker; queued there while it has no `held`.

    `confirmed`: the gate named it; until then it is a prediction. `reload`: no prediction had named it. `hit`: no
    load was begun for it. `rows`: how many rows it computes. `sent`: they were. `calls`: computations not yet answered.
    `importance`: for the choice of a form.
    """

    seq: int
    opened: LayerVisit
    expert: ExpertId
    worker: int = -1
    held: Residence | None = None
    confirmed: bool = False
    reload: bool = False
    hit: bool = False
    failures: int = 0
    rows: int = 0
    sent: bool = False
    calls: list[int] = field(default_factory=list)
    importance: Importance = PREDICTED

    @property
    def urgency(self) -> int:
        """What a gate has named comes first, then what is only predicted, then a warm-up; each first come, first
        served."""
        return self.seq if self.confirmed else self.seq + (_WARM_UP if self.opened.warm_up else _PREDICTED)


@dataclass(slots=True, eq=False)
class Worker:
    """`slots`: None where free; `free`: their numbers, a heap. `queue`: demands that have no slot yet, most urgent
    first. `idle`: kept experts that nobody needs now. `named`: experts that a gate has named, still to be computed
    here. `loading`: what is on the link or waits for it, in the order of asking. A host place has no slots; `hosted`:
    what it computes."""

    number: int
    slots: list[Residence | None]
    free: list[int]
    queue: list[Demand] = field(default_factory=list)
    idle: dict[ExpertId, Residence] = field(default_factory=dict)
    named: int = 0
    loading: list[Residence] = field(default_factory=list)
    hosted: dict[int, Residence] = field(default_factory=dict)

    def enqueue(self, demand: Demand) -> None:
        queue = self.queue
        demand.worker = self.number
        if not queue or queue[-1].urgency < demand.urgency:
            queue.append(demand)
        else:
            bisect.insort(queue, demand, key=_urgency)

    def least_urgent_prefetch(self) -> Residence | None:
        """What can be put off: in a slot, only predicted, and wanted last."""
        held = [held for held in self.slots if held is not None and held.users and held.urgency >= 0]
        return max(held, key=lambda h: h.urgency, default=None)

    def demands(self) -> Iterator[Demand]:
        for held in self.slots:
            if held is not None:
                yield from held.users
        for held in self.hosted.values():
            yield from held.users
        yield from self.queue
