"""Which workers there are, what they cost, and which of them an expert goes to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from scheduler import types as t
from scheduler.core.groups import Grouping, weighted_ring
from scheduler.core.holders import Holders
from scheduler.core.homes import Homes
from scheduler.core.host_memory import HostTable
from scheduler.core.state import Demand, LayerVisit, State, Worker
from scheduler.errors import ConfigError
from scheduler.policies.placement import Costs
from scheduler.policies.residency.base import Residency

AWAY = 2.0
"""An expert is loaded elsewhere than at its home if that has so many more to load or compute. One of median speed
counts 1."""


class WorkerTable:
    """Workers come and go. Whoever calls `on_lost` brings the lost worker's demands elsewhere."""

    def __init__(self, state: State, grouping: Grouping, residency: Residency, host_memory: HostTable) -> None:
        self.live: tuple[int, ...] = ()
        """Numbers of the workers with slots, ascending."""
        self.turns: tuple[int, ...] = ()
        """These workers in the order of their turns, a fast one more often than a slow one."""
        self.hosts: tuple[int, ...] = ()
        """Numbers of the host places, ascending."""
        self.slots = 0
        """Of all workers together."""
        self._least_pace = 1.0
        self._state = state
        self._grouping = grouping
        self._residency = residency
        self.holders = Holders()
        self.host_memory = host_memory
        """Of all workers."""
        self.sticks = False
        """The residency keeps experts: in parts, the same one goes to the same worker."""
        self.homes = Homes(state.shape, self.holders) if residency.has_homes else None
        """Where each expert lives, if the residency gives it one worker and loads it nowhere else."""

    @property
    def costs(self) -> Costs:
        """Means over the workers that know what their loads and computations take; 0 where none does."""
        device = [self._state.workers[number].joined for number in self.live]
        host = [self._state.workers[number].joined for number in self.hosts]
        return Costs(
            load_s=_mean([self._expected_load_s(event) for event in device]),
            device_call_s=_mean([event.call_s for event in device]),
            device_row_s=_mean([event.row_s for event in device]),
            host_call_s=_mean([event.call_s for event in host]),
            host_row_s=_mean([event.row_s for event in host]),
        )

    def _expected_load_s(self, joined: t.WorkerJoined) -> float:
        return self.host_memory.expected_load_s(joined) if self.host_memory.memories else joined.load_s

    @property
    def form_costs(self) -> dict[str, tuple[float, float]]:
        """Form -> seconds to load an expert and to restore it, of the median worker that knows them."""
        costs = [cost for number in self.live for cost in self._state.workers[number].joined.forms]
        found = {}
        for form in dict.fromkeys(cost.form for cost in costs):
            of_form = sorted((cost.load_s, cost.restore_s) for cost in costs if cost.form == form)
            found[form] = of_form[len(of_form) // 2]
        return found

    def on_joined(self, event: t.WorkerJoined) -> None:
        """Raises ConfigError for a number of slots that cannot be."""
        number, slots = event.worker, event.slots
        if slots < 0:
            raise ConfigError(f"worker {number} has {slots} slots; allowed: 0 (a host place), 1, 2, ...")
        free, losses = list(range(slots)), self._state.losses
        self._state.workers[number] = Worker(number, event, [None] * slots, free, joined_at=losses)
        self.holders.on_worker_joined(number, slots, event.held)
        if not slots:
            self.hosts = tuple(sorted((*self.hosts, number)))
            return
        self.host_memory.on_worker_joined(event)
        if self.homes is not None:
            self.homes.on_worker_joined(number, slots)
        self._take_turns((*self.live, number))
        self.slots += slots
        self.settle()

    def on_lost(self, event: t.WorkerLost) -> Worker | None:
        """None where it was lost before."""
        number = event.worker
        worker = self._state.workers.pop(number, None)
        if worker is None:
            return None
        self._state.losses += 1
        self.holders.on_worker_lost(number, event.reason)
        self.host_memory.on_worker_lost(number)
        self.hosts = tuple(n for n in self.hosts if n != number)
        if number not in self.live:
            return worker
        self._take_turns([n for n in self.live if n != number])
        self.slots -= len(worker.slots)
        if self.homes is not None:
            self.homes.on_worker_lost(number)
        self._state.shortfall = f"the last worker is gone: {event.reason}"
        self.settle()
        return worker

    def on_holdings_changed(self, event: t.HoldingsChanged) -> None:
        """Of a worker that is connected."""
        self.holders.on_changed(event.worker, event.held)
        self._move_out(event.worker)

    def _move_out(self, number: int) -> None:
        """Homes follow what the worker holds, and has in slots."""
        if self.homes is not None and number in self.live:
            kept = {entry.expert for entry in self._state.workers[number].slots if entry is not None and entry.keeps}
            self.homes.on_holdings_changed(number, kept)
        self.settle()

    def _take_turns(self, workers: Sequence[int]) -> None:
        self.live = tuple(sorted(workers))
        joined = [self._state.workers[number].joined for number in self.live]
        self.turns = weighted_ring({one.worker: one.load_s + one.call_s + one.row_s for one in joined})
        for number, places in Counter(self.turns).items():
            self._state.workers[number].pace = len(self.turns) / (places * len(self.live))
        self._least_pace = min((self._state.workers[number].pace for number in self.live), default=1.0)

    def settle(self) -> None:
        """Give the residency its slots; and homes to experts, once a request needs them: by then more workers may have
        joined. `State.shortfall` is then why these workers cannot hold the experts that must stay; None where they can.
        """
        if not self.live:
            return
        try:
            self._residency.check(self._state.shape, self.slots)
        except ConfigError as error:
            self._state.shortfall = str(error)
            return
        if self.homes is not None and self._state.requests:
            self.homes.settle()
        self._state.shortfall = None

    # --- which worker -------------------------------------------------------------------------------------------

    def choose(self, demand: Demand, assigned: int | None, avoid: int | None) -> int | None:
        """Where the demand's expert is loaded: at its home; else at the worker that its turn has assigned; else at the
        least busy one, not `avoid` if there is another. Of a store in parts, at a worker that holds it: None if there
        is none."""
        home = self._home(demand.expert)
        if home is not None:
            return home
        if self.holders.in_parts:
            return self._holder(demand, avoid)
        return assigned if assigned is not None else self.least_busy(demand.visit.turn, avoid)

    def _home(self, expert: t.ExpertId) -> int | None:
        """Of an expert that is in no slot."""
        home = self.homes.worker_of(expert) if self.homes is not None else None
        if self.homes is None or home is None or self.holders.holds(home, expert):
            return home
        self._move_out(home)
        return self.homes.worker_of(expert)

    def _holder(self, demand: Demand, avoid: int | None) -> int | None:
        """The least busy worker that holds it; with a cache its home, unless that is much busier. Not `avoid`, if
        another holds it."""
        holders = self.holders.of(demand.expert)
        among = [number for number in holders if number != avoid] or holders
        if len(among) < 2:
            return among[0] if among else None
        visit = demand.visit
        best = self.least_busy(visit.turn, among=among) if demand.confirmed else self.spread(visit, among)
        home = self.holders.home(demand.expert) if self.sticks else best
        if home in (best, avoid):
            return best
        near, far = (self._business(number, demand) for number in (home, best))
        return home if near < far + AWAY else best

    def _business(self, number: int, demand: Demand) -> float:
        """Experts that the worker has to load or compute: for gates, or for the layer of a prediction."""
        worker = self._state.workers[number]
        count = worker.backlog if demand.confirmed else self._state.spread[demand.visit.due].get(number, 0)
        return (count + 1) * worker.pace

    def group(self, turn: int) -> list[int]:
        """The workers that serve this turn's layer together; empty where there are none."""
        return self._grouping.group(self.turns, turn) if self.live else []

    def share(self, ordinal: int) -> Sequence[int | None]:
        """Prefill: the worker of each expert of the `ordinal`-th MoE layer; None where there are no workers."""
        count = self._state.shape.count(ordinal)
        return self._grouping.share(self.turns, ordinal, count) if self.live else [None] * count

    def _ring(self, turn: int, among: Collection[int] | None) -> Iterable[int]:
        ring = self._grouping.ring(self.turns, turn)
        return ring if among is None else (number for number in ring if number in among)

    def least_busy(self, turn: int, avoid: int | None = None, among: Collection[int] | None = None) -> int:
        """For an expert that no prediction has assigned: who would have computed it first by its backlog and speed,
        then a slot that is free or can be made so, then this turn's group. `avoid`: taken only if it is the only one.
        `among`: of these workers; None: of all.
        """
        best, least = -1, (True, math.inf, True)
        for number in self._ring(turn, among):
            worker = self._state.workers[number]
            key = number == avoid, (worker.backlog + 1) * worker.pace, not (worker.free or worker.idle)
            if key < least:
                best, least = number, key
                if key == (False, self._least_pace, False):
                    break
        return best

    def spread(self, visit: LayerVisit, among: Collection[int] | None = None) -> int:
        """For an expert predicted for a layer of several rows: a worker that has no expert for the layers next to it,
        as many as the workers can serve without any of them loading twice, and more for a slow one. A slot is taken
        until its layer. Of those the one with the fewest of this layer's experts for its speed, then of prefetches,
        then the first from this turn's group on. `among`: as in `least_busy`."""
        counts, workers = self._state.spread.setdefault(visit.due, Counter()), self._state.workers
        rows = sum(one.tokens for one in self._state.step.passes.values() if not one.prefill)
        experts = min(self._state.shape.experts, max(1, rows) * self._state.shape.top_k)
        turns = max(1, len(self.live) // experts)

        ring = enumerate(self._ring(visit.turn, among))
        best, farthest = -1, -1.0
        for _, _, _, number in sorted([self._load_of(counts, number, place) for place, number in ring]):
            worker = workers[number]
            most = max(turns, round(turns * worker.pace))
            distance = worker.distance(visit.due, most) / most
            if distance == 1:  # as far as counts, and nobody with less to load was
                return number
            if distance > farthest:
                best, farthest = number, distance
        return best

    def _load_of(self, counts: Counter[int], number: int, place: int) -> tuple[float, float, int, int]:
        """The order in which `spread` asks workers."""
        worker = self._state.workers[number]
        return (counts.get(number, 0) + 1) * worker.pace, worker.prefetches * worker.pace, place, number

    def has_host(self, expert: t.ExpertId) -> bool:
        """Whether a host place holds it."""
        return any(self.holders.holds(number, expert) for number in self.hosts)

    def least_busy_host(self, expert: t.ExpertId) -> Worker:
        """Of the host places that hold it."""
        hosts = (self._state.workers[number] for number in self.hosts if self.holders.holds(number, expert))
        return min(hosts, key=lambda w: (w.backlog, w.number))


def _mean(values: list[float]) -> float:
    known = [value for value in values if value]
    return sum(known) / len(known) if known else 0.0
