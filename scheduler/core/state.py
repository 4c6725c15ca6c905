"""What the core knows: requests, the layers that they visit, the experts that those need, and what is in each slot.

Plain data. The parts of the core change it (`workers.py`, `slots.py`, `passes.py`, `dispatch.py`).
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

from scheduler.core.host_memory import HostMemory
from scheduler.core.stats import RequestStats
from scheduler.policies.importance import LayerImportance
from scheduler.policies.precision import FULL, PREDICTED, Importance
from scheduler.types import ExpertId, GateFired, ModelShape, Pass, Visit, WorkerJoined

DemandState = Literal["queued", "loading", "ready", "hosted", "over"]
"""See `Demand`."""
TRANSITIONS: dict[tuple[DemandState, DemandState], str] = {
    ("queued", "loading"): "start_load: its load begins; share: a load in flight serves it",
    ("queued", "ready"): "share: its expert is in a slot",
    ("queued", "hosted"): "move_to_host: a host place computes it",
    ("queued", "over"): "end: cancelled",
    ("loading", "ready"): "finish_load: the bytes are in the slot",
    ("loading", "queued"): "requeue: pre-empted, its load has failed, or its worker is lost",
    ("loading", "over"): "end: cancelled",
    ("ready", "queued"): "requeue: pre-empted, of a form that does not serve, failed, or lost with its worker",
    ("ready", "over"): "end: computed, or cancelled",
    ("hosted", "queued"): "requeue: a computation has failed, or its host place is lost",
    ("hosted", "over"): "end: computed, or cancelled",
}
"""Every change of a demand's state: the method of `Demand` that makes it, and when."""
Origin = Literal["prediction", "plan", "warm-up", "gate", "host"]
"""What a demand was made for. A prediction, even if it could not be loaded then; prefill's plan, which gives every
expert a worker; a residency that wants it in a slot when decoding begins; a gate that chose what no prediction had
named; or a placement that has it computed at a host place."""

Urgency = tuple[int, int, int]
"""(class, step and layer in which it is needed, number of the demand): the smallest comes first."""
CONFIRMED, PREFETCH, ABSENT, WARM_UP = range(4)
"""The classes. `ABSENT`: prefetches of requests that are not in the step."""


class InconsistentStateError(RuntimeError):
    """The scheduler's books contradict each other: a defect of the scheduler, or a recording that was changed."""


_urgency = attrgetter("urgency")
_rank = attrgetter("rank")


@dataclass(slots=True, eq=False)
class Request:
    """An open request."""

    stats: RequestStats
    prefilling: bool = True
    reached: tuple[int, int] = (0, -1)
    """The position of the pass under way, and the ordinal of the last layer whose gate has fired in it."""
    rows: int = 1
    """How many rows that pass has."""
    lead: int = 0
    """The number of the step minus the position of its pass's last row: a row at position q is expected in step q +
    `lead`."""
    absent: bool = False
    """It is not in the step that is under way: its client has not asked for the next token."""
    block: int = 1
    """Rows that later passes are expected to have: as many as that pass, where it decodes."""
    planned: int = 0
    """How many layers prefill has assigned to workers."""
    cold: bool = False
    """Workers were missing when prefill was over: the warm-up is still to come."""

    @property
    def position(self) -> int:
        """Of the first row of the pass under way."""
        return self.reached[0]

    def step_of(self, position: int) -> int:
        """The step in which a row after the pass under way is expected."""
        first = self.position + self.rows
        return self.lead + first + (position - first) // self.block

    @property
    def in_block(self) -> bool:
        """The pass under way is a decoding pass of several rows."""
        return self.rows > 1 and not self.prefilling


@dataclass(slots=True)
class Step:
    """Passes that run in lock-step: a layer's gates count as fired once those of all passes have."""

    number: int = 0
    passes: dict[int, Pass] = field(default_factory=dict)
    """By request, in the order in which the main model began them."""
    gates: dict[int, GateFired] = field(default_factory=dict)
    """By request: gates that wait for those of the other passes."""
    absent: bool = False
    """There are open requests that are not in the step."""


@dataclass(slots=True, eq=False)
class LayerVisit:
    """One pass through one MoE layer, from the first prediction of it until every expert has been computed."""

    id: Visit
    request: Request
    turn: int
    """How many MoE layers decoding has visited before. It chooses the group."""
    due: int
    """The step in which it is expected, times the number of MoE layers, plus the layer's ordinal; -1 for a warm-up."""
    demands: dict[int, Demand] = field(default_factory=dict)
    """By expert; by `Demand.seq` in a warm-up, which spans layers."""
    unloadable: tuple[int, ...] = ()
    """Experts that were predicted, and whose loads have failed too often."""
    forecasts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """What is prefetched for each row of a block, by position."""
    importance: LayerImportance | None = None
    """How much each expert matters, where a policy reads it."""
    uncomputed: int = 0
    """Experts that the gate chose and that have not been computed yet."""
    missing: int = 0
    """Of those on workers with slots, the ones whose bytes are not in a slot yet."""
    stalled_from: float = 0.0
    """When the gate fired, or the last stall ended."""

    def begin_stall(self, missing: int, now: float) -> None:
        """The gate has fired. Every chosen expert counts as missing until `on_loaded`."""
        self.missing, self.stalled_from = missing, now

    def on_loaded(self, now: float) -> None:
        """A chosen expert is in its slot. With the last of them the stall ends."""
        self.missing -= 1
        if self.missing == 0:
            self.request.stats.add_stall(now - self.stalled_from, self.request.prefilling)
            self.stalled_from = now


@dataclass(slots=True, eq=False)
class SlotEntry:
    """An expert in a slot, or on its way there."""

    worker: int
    slot: int
    expert: ExpertId
    load_id: int
    keeps: bool
    """The residency lets it stay when no demand needs it."""
    stats: RequestStats
    """Of the request for which its load was begun."""
    users: list[Demand]
    """Demands of several visits may share it."""
    form: str = FULL
    host_slot: int | None = None
    """Of host memory, through which it is loaded."""
    in_memory: bool = False
    """Its bytes were in host memory when its load was begun."""
    loaded: bool = False
    leaving: bool = False
    """The worker evicts it after a computation that it was sent, or it has failed. It takes no more users."""
    last: Demand | None = None
    """The demand with that computation."""

    @property
    def is_confirmed(self) -> bool:
        """A gate has chosen it."""
        return any(demand.confirmed for demand in self.users)

    @property
    def urgency(self) -> Urgency:
        """That of its most urgent user."""
        return min(demand.urgency for demand in self.users)


@dataclass(slots=True, eq=False)
class Demand:
    """One expert that one visit needs, on one worker.

        prediction, plan, warm-up, gate                           gate
                   │                                                │
                   ▼     load begins            load ended          ▼
                queued ──────────────► loading ───────────► ready   hosted
                   ├── in flight ─────────▲                   ▲
                   └── in a slot ─────────────────────────────┘

    `TRANSITIONS` has all changes, those back to `queued` and to `over` too. `hosted`: a host place computes the expert
    where it lies, without a load. While workers are missing it is queued without a worker (`State.waiting`).

    A demand begins as a prefetch, or at the gate. The gate confirms the prefetches that it chose, and cancels the
    others. A confirmed demand's rows are sent as soon as it has a slot; the worker holds them until the load has ended.
    Only a prefetch is pre-empted.
    """

    seq: int
    visit: LayerVisit
    expert: ExpertId
    origin: Origin
    state: DemandState = "queued"
    worker: int = -1
    """-1: not placed."""
    entry: SlotEntry | None = None
    """Its expert in a slot: while it is loading or ready."""
    confirmed: bool = False
    """The gate has chosen it."""
    hit: bool = False
    """It shares an expert whose load was begun for another demand."""
    failures: int = 0
    lost: tuple[int, ...] = ()
    """Workers that were lost while they may have loaded or computed it: it is suspect."""
    lost_at: int = 0
    """`State.losses` at the last of these losses that counts as its failure."""
    rows: int = 0
    """How many rows it computes."""
    calls: list[int] = field(default_factory=list)
    """Computations that have been sent and not answered."""
    importance: Importance = PREDICTED
    """Decides the form in which the expert is loaded."""
    rank: Urgency = (PREFETCH, 0, 0)
    """Its urgency when its worker's queue was put in order. A queue is searched far more often than it changes."""

    @property
    def urgency(self) -> Urgency:
        """Confirmed demands come first, in the order in which they came. Then come prefetches, in the order in which
        their layers are expected, and warm-ups."""
        if self.confirmed:
            return (CONFIRMED, 0, self.seq)
        if self.origin == "warm-up":
            return (WARM_UP, 0, self.seq)
        visit = self.visit
        return (ABSENT if visit.request.absent else PREFETCH, visit.due, self.seq)

    @property
    def key(self) -> int:
        """Where it stands in its visit's `demands`."""
        return self.seq if self.origin == "warm-up" else self.expert.expert

    # --- transitions --------------------------------------------------------------------------------------------

    def start_load(self, entry: SlotEntry) -> None:
        """A load is begun for it."""
        self._move("loading")
        self.entry, self.hit = entry, False

    def share(self, entry: SlotEntry) -> None:
        """A hit: no load is begun for it."""
        self._move("ready" if entry.loaded else "loading")
        self.worker, self.entry, self.hit = entry.worker, entry, True

    def finish_load(self) -> None:
        self._move("ready")

    def move_to_host(self, worker: int) -> None:
        self._move("hosted")
        self.worker, self.hit = worker, False

    def requeue(self) -> None:
        """It has no slot any more, and begins again."""
        if self.state != "queued":
            self._move("queued")
        self.entry = None

    def end(self) -> None:
        """No visit needs it any more."""
        self._move("over")
        self.entry = None

    def end_warm_up(self) -> None:
        """Its expert is there, or on its way, or may not stay."""
        del self.visit.demands[self.seq]
        self.end()

    def _move(self, to: DemandState) -> None:
        if (self.state, to) not in TRANSITIONS:
            expert = f"the demand for expert {self.expert.expert} of layer {self.expert.layer}"
            raise InconsistentStateError(f"{expert} goes from {self.state} to {to}, which no demand may")
        self.state = to


@dataclass(slots=True, eq=False)
class Worker:
    """A worker node; a host place where it has no slots."""

    number: int
    joined: WorkerJoined
    slots: list[SlotEntry | None]
    """None where free."""
    free: list[int]
    """Numbers of the free slots, a heap."""
    queue: list[Demand] = field(default_factory=list)
    """Demands that are queued, most urgent first."""
    link: list[SlotEntry] = field(default_factory=list)
    """Loads in flight, in the order of their commands. The first is under way, the others wait for it."""
    link_since: float = 0.0
    """When the first of them came to be under way."""
    idle: dict[ExpertId, SlotEntry] = field(default_factory=dict)
    """Kept experts that no demand needs, the longest idle first."""
    hosted: dict[int, Demand] = field(default_factory=dict)
    """What a host place computes, by `Demand.seq`."""
    backlog: int = 0
    """Confirmed demands that are still to be computed here."""
    joined_at: int = 0
    """`State.losses` when it joined."""
    pace: float = 1.0
    """How long it takes for an expert, over the mean of all, as turns are shared out; 1 if all are equal."""

    def enqueue(self, demand: Demand) -> None:
        queue = self.queue
        demand.worker, demand.rank = self.number, demand.urgency
        if not queue or queue[-1].rank < demand.rank:
            queue.append(demand)
        else:
            bisect.insort(queue, demand, key=_rank)

    def append_load(self, entry: SlotEntry, now: float) -> None:
        """Its load is in flight, behind the others."""
        if not self.link:
            self.link_since = now
        self.link.append(entry)

    def load_left_s(self, entry: SlotEntry, load_s: float, now: float) -> float:
        """Until the load of an expert on this worker ends, if each takes `load_s`; 0 where it has ended."""
        if entry.loaded:
            return 0.0
        return max(0.0, self.link_since + load_s - now) + self.link.index(entry) * load_s

    def end_load(self, entry: SlotEntry, now: float) -> None:
        """Its load is over, or given up: if it was under way, the next one is now."""
        if self.link[0] is entry:
            self.link_since = now
        self.link.remove(entry)

    def reorder(self) -> None:
        """The urgency of queued demands has changed."""
        for demand in self.queue:
            demand.rank = demand.urgency
        self.queue.sort(key=_rank)

    @property
    def prefetches(self) -> int:
        """How much it has to load, and holds, before a gate has chosen it."""
        return len(self.queue) + len(self.slots) - len(self.free) - len(self.idle)

    def distance(self, due: int, most: int) -> int:
        """How many layers lie between this one and the nearest for which it has an expert in a slot or a queued
        prefetch; `most` where there are more, or none."""
        least = most
        if self.queue:
            place = bisect.bisect_left(self.queue, (PREFETCH, due, 0), key=_rank)
            for demand in self.queue[max(0, place - 1) : place + 1]:
                away = abs(due - demand.visit.due)
                if away < least:  # min() costs more than all the rest
                    least = away
        if not least:
            return 0
        for entry in self.slots:
            if entry is not None:
                for user in entry.users:
                    away = abs(due - user.visit.due)
                    if away < least:
                        least = away
        return least

    def least_urgent_prefetch(self, among: Sequence[SlotEntry | None]) -> SlotEntry | None:
        """What can be put off: in a slot for a prefetch only, and needed last."""
        entries = [entry for entry in among if entry is not None and entry.users and not entry.is_confirmed]
        return max(entries, key=_urgency, default=None)

    def under_way(self) -> list[Demand]:
        """What it loads just now, or may be computing: outputs may have been on their way, so any that it owes."""
        loading = self.link[0].users if self.link else []
        loaded = [entry for entry in self.slots if entry is not None and entry.loaded]
        computing = [user for entry in loaded for user in entry.users if user.calls]
        return [*loading, *computing, *self.hosted.values()]

    def demands(self) -> Iterator[Demand]:
        for entry in self.slots:
            if entry is not None:
                yield from entry.users
        yield from self.hosted.values()
        yield from self.queue


@dataclass(slots=True, eq=False)
class Audit:
    """A computation that is done again by another worker. It belongs to no visit."""

    number: int
    call_id: int
    entry: SlotEntry
    """Its expert in a slot: kept there, or loaded for the audit."""
    alone: bool
    """Loaded for the audit alone. The worker evicts it after the computation."""

    @property
    def loading(self) -> bool:
        """Its own load is in flight. `Worker.link` has only those of demands."""
        return self.alone and not self.entry.loaded


@dataclass(slots=True, eq=False)
class State:
    """All of it, at one moment."""

    shape: ModelShape
    now: float = 0.0
    """The time of the event that is being handled, in seconds on the caller's clock."""
    stats: dict[int, RequestStats] = field(default_factory=dict)
    """By request, closed ones included until the caller removes them."""
    requests: dict[int, Request] = field(default_factory=dict)
    step: Step = field(default_factory=Step)
    visits: dict[Visit, LayerVisit] = field(default_factory=dict)
    """Predicted, or under way."""
    workers: dict[int, Worker] = field(default_factory=dict)
    host_memories: dict[int, HostMemory] = field(default_factory=dict)
    """By worker, of those that have host slots."""
    loads: dict[int, SlotEntry] = field(default_factory=dict)
    """In flight, by `Load.load_id`."""
    calls: dict[int, Demand] = field(default_factory=dict)
    """Computations not answered, by `Compute.call_id`."""
    audits: dict[int, Audit] = field(default_factory=dict)
    """Under way, by `Compute.call_id`."""
    kept: dict[int, dict[int, SlotEntry]] = field(init=False)
    """Layer -> expert -> where it is kept, loads in flight included."""
    passing: dict[ExpertId, list[SlotEntry]] = field(default_factory=dict)
    """Where experts are that are not kept, loads in flight included."""
    queued: dict[ExpertId, list[Demand]] = field(default_factory=dict)
    """All demands that are in the queues of workers."""
    shortfall: str | None = "no worker is connected"
    """What is missing, while the workers cannot hold what must be in slots."""
    waiting: dict[int, Demand] = field(default_factory=dict)
    """Demands without a worker, by `Demand.seq`: they get one when the shortfall is over. Suspects among them get one
    when no other is `tried`."""
    unheld: dict[int, Demand] = field(default_factory=dict)
    """Demands for experts that no worker holds, by `Demand.seq`: they get one when a worker holds them."""
    tried: Demand | None = None
    """The suspect that is being loaded or computed again. Only one is at a time: if its worker is lost too, the others
    had no part in that."""
    losses: int = 0
    """Of workers so far."""
    spread: dict[int, Counter[int]] = field(default_factory=dict)
    """`LayerVisit.due` -> worker -> experts that were queued there for that layer, where several rows need it."""
    touched: set[int] = field(default_factory=set)
    """Workers where a load may begin when this event ends."""
    held_back: dict[Visit, LayerVisit] = field(default_factory=dict)
    """Visits whose rows may be sent when this event ends (prefill `in-turn`)."""

    def __post_init__(self) -> None:
        self.kept = {layer: {} for layer in self.shape.layers}

    def wait(self, demand: Demand) -> None:
        """For a worker, or for the end of a trial."""
        demand.worker = -1
        self.waiting[demand.seq] = demand

    def lack(self, demand: Demand) -> None:
        """No worker holds its expert. A warm-up is over with that."""
        self.end_trial(demand)
        if demand.origin == "warm-up":
            demand.end_warm_up()
            return
        demand.worker = -1
        self.unheld[demand.seq] = demand

    def take_unheld(self) -> list[Demand]:
        """Those whose experts no worker held, most urgent first; `SlotTable.place` them then."""
        unheld = sorted(self.unheld.values(), key=_urgency)
        self.unheld.clear()
        return unheld

    def take_waiting(self) -> list[Demand]:
        """Those that have waited for a worker, most urgent first; `SlotTable.place` them then."""
        waiting = sorted(self.waiting.values(), key=_urgency)
        self.waiting.clear()
        return waiting

    def take_suspect(self) -> Demand | None:
        """The most urgent of those that wait, if none is tried and workers are there; `SlotTable.place` it then."""
        if not self.waiting or self.tried is not None or self.shortfall is not None:
            return None
        return self.waiting.pop(min(self.waiting.values(), key=_urgency).seq)

    def end_trial(self, demand: Demand) -> None:
        """It is computed, or not needed any more."""
        if self.tried is demand:
            self.tried = None
