"""What stands in which slot and what waits for one: loads begin here, are shared, and make room for each other.

Work is proportional to what an event touches: workers where a slot came free or a demand was queued are remembered, and
only they are looked at when loads may begin.

A worker's link carries one load at a time. What is only predicted is asked for `AHEAD` loads at a time, so that the
link never rests; a load that a gate waits for is asked for at once, and whatever is only predicted makes way for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from scheduler import types as t
from scheduler.core.groups import Grouping
from scheduler.core.homes import Homes
from scheduler.core.state import Demand, Residence, Worker
from scheduler.errors import ConfigError
from scheduler.policies.placement import Costs
from scheduler.policies.precision import FULL, Precision
from scheduler.policies.residency.base import Residency

AHEAD = 2


class SlotTable:
    """`out`: takes the commands. `ready` is told of each demand that the gate has named and that has its slot;
    `load_over` of each that did not have to wait for its load, since another's had ended.

    `live`: the numbers of workers with slots, ascending; `hosts`: of those without, the host places. `total`: slots of
    all workers. `loads`: those under way, by their ids.
    """

    def __init__(
        self, shape: t.ModelShape, grouping: Grouping, residency: Residency, precision: Precision,
        ids: Iterator[int], out: list[t.Command], ready: Callable[[Demand], None], load_over: Callable[[Demand], None],
    ) -> None:  # fmt: skip
        self.workers: dict[int, Worker] = {}
        self.live: tuple[int, ...] = ()
        self.hosts: tuple[int, ...] = ()
        self.total = 0
        self.loads: dict[int, Residence] = {}
        self._shape = shape
        self._grouping = grouping
        self._residency = residency
        self._precision = precision if len(precision.forms) > 1 or precision.forms[0] != FULL else None
        self._homes = Homes(shape) if residency.homed else None
        self._ids = ids
        self._out = out
        self._ready = ready
        self._load_over = load_over
        self._joined: dict[int, t.WorkerJoined] = {}
        self._kept: dict[int, dict[int, Residence]] = {layer: {} for layer in shape.layers}
        self._touched: set[int] = set()

    # --- workers ------------------------------------------------------------------------------------------------

    @property
    def costs(self) -> Costs:
        """Means over the workers that said what loads and computations take; 0 where none did."""
        device = [self._joined[number] for number in self.live]
        host = [self._joined[number] for number in self.hosts]
        return Costs(
            _mean([event.load_s for event in device]), _mean([event.call_s for event in device]),
            _mean([event.row_s for event in device]), _mean([event.call_s for event in host]),
            _mean([event.row_s for event in host]),
        )  # fmt: skip

    def worker_joined(self, event: t.WorkerJoined) -> None:
        number, slots = event.worker, event.slots
        self._joined[number] = event
        self.workers[number] = Worker(number, [None] * slots, list(range(slots)))
        if not slots:
            self.hosts = tuple(sorted((*self.hosts, number)))
            return
        if self._homes is not None:
            self._homes.joined(number, slots)
        self.live = tuple(sorted((*self.live, number)))
        self.total += slots

    def worker_lost(self, number: int) -> Worker | None:
        """Its loads are over, and what it kept is gone. Its demands are the caller's to `detach` and bring
        elsewhere."""
        worker = self.workers.pop(number, None)
        if worker is None:
            return None
        self.live = tuple(n for n in self.live if n != number)
        self.hosts = tuple(n for n in self.hosts if n != number)
        self.total -= len(worker.slots)
        self._touched.discard(number)
        for held in worker.slots:
            if held is not None:
                self.loads.pop(held.load_id, None)
                self._forget(held)
        if self._homes is not None and worker.slots:
            self._homes.lost(number)
        return worker

    def shortfall(self) -> str | None:
        """Why these workers cannot hold what must stay."""
        try:
            self._residency.check(self._shape, self.total)
        except ConfigError as error:
            return str(error)
        if self._homes is not None:
            self._homes.settle()
        return None

    # --- demands ------------------------------------------------------------------------------------------------

    def resident(self, layer: int) -> dict[int, Residence]:
        """Experts of a layer that are kept in slots, those on their way among them."""
        return self._kept[layer]

    def place_on_host(self, demand: Demand) -> None:
        """It is computed at the host place that has least to do, where its expert lies."""
        worker = min((self.workers[number] for number in self.hosts), key=lambda one: (one.named, one.number))
        held = Residence(
            worker.number, 0, demand.expert, 0, False, demand.opened.request.stats, [demand], loaded=True, hosted=True
        )
        worker.hosted[demand.seq] = held
        worker.named += 1
        demand.worker, demand.held, demand.hit = worker.number, held, False
        self._ready(demand)

    def place(self, demand: Demand, number: int | None = None, shun: int | None = None) -> None:
        """It goes where its expert is kept, or has its home, else to worker `number`, else to whom `_choose` finds."""
        held = self._good(demand)
        if held is not None:
            self._join(demand, held)
            return
        if self._homes is not None:
            number = self._homes.of(demand.expert)
        elif number is None:
            number = self._choose(demand.opened.turn, shun)
        worker = self.workers[number]
        worker.enqueue(demand)
        worker.named += demand.confirmed
        if worker.free or worker.idle or demand.confirmed:  # what is only predicted pre-empts nobody
            self._touched.add(number)

    def _choose(self, turn: int, shun: int | None) -> int:
        """The worker for an expert that nobody was assigned: least named work, then a free slot, then its group."""
        best, least = -1, (True, 1 << 60, True)
        for number in self._grouping.ring(self.live, turn):
            worker = self.workers[number]
            key = number == shun, worker.named, not (worker.free or worker.idle)
            if key < least:
                best, least = number, key
                if key == (False, 0, False):
                    break
        return best

    def confirm(self, demand: Demand) -> None:
        """The gate has named what was predicted."""
        worker = self.workers[demand.worker]
        worker.named += 1
        held = demand.held
        if held is None:
            worker.queue.remove(demand)
        elif self._precision is not None and len(held.users) == 1 and not self._serves(held, demand):
            self.evict(held)
            demand.held = held = None
        demand.confirmed = True
        if held is None:
            worker.enqueue(demand)
        else:
            self._ready(demand)
        if held is None or (not held.loaded and worker.loading[0] is not held):
            self._touched.add(demand.worker)

    def cancel(self, demand: Demand) -> None:
        """Nobody wants it any more; what was in a slot for it alone, and is not kept, is evicted."""
        held = demand.held
        if held is not None and held.hosted:
            self.detach(demand)
            return
        worker = self.workers.get(demand.worker)
        if held is None:
            if worker is not None:
                worker.queue.remove(demand)
                worker.named -= demand.confirmed
            return
        self.detach(demand)
        if held.keeps or held.users:
            self._one_less(held)
        else:
            self.evict(held)

    def computed(self, held: Residence, demand: Demand) -> None:
        """Its last row has come back; a slot that is not kept has been left."""
        worker = self.workers[held.worker]
        worker.named -= 1
        held.users.remove(demand)
        demand.held = None
        if held.hosted:
            del worker.hosted[demand.seq]
        elif not held.keeps:
            worker.slots[held.slot] = None
            heappush(worker.free, held.slot)
            if worker.queue:
                self._touched.add(held.worker)
        else:
            self._one_less(held)

    def detach(self, demand: Demand) -> None:
        """Take it out of its slot, whatever becomes of that."""
        if demand.held is not None:
            demand.held.users.remove(demand)
            demand.held = None
        worker = self.workers.get(demand.worker)
        if worker is not None:
            worker.named -= demand.confirmed
            worker.hosted.pop(demand.seq, None)

    # --- slots --------------------------------------------------------------------------------------------------

    def loaded(self, held: Residence) -> None:
        """Its bytes are there, and its worker's link is free for the next."""
        held.loaded = True
        del self.loads[held.load_id]
        worker = self.workers[held.worker]
        worker.loading.remove(held)
        if worker.queue and (worker.free or worker.idle or worker.queue[0].confirmed):
            self._touched.add(held.worker)

    def evict(self, held: Residence) -> None:
        if held.hosted:
            return
        self._out.append(t.Evict(held.worker, held.slot, held.expert))
        self._vacate(held)

    def invalidate(self, held: Residence) -> None:
        """Something failed in its slot: it may not stay. Where nobody needs it, it goes at once."""
        self._forget(held)
        held.keeps = False
        if not held.users and not held.hosted:
            self.workers[held.worker].idle.pop(held.expert, None)
            self.evict(held)

    def _one_less(self, held: Residence) -> None:
        """Kept, and needed by nobody now, or by predictions only, which can be put off."""
        worker = self.workers[held.worker]
        if not held.users:
            worker.idle[held.expert] = held
        self._touched.add(held.worker)

    def _vacate(self, held: Residence) -> None:
        self._forget(held)
        worker = self.workers[held.worker]
        if self.loads.pop(held.load_id, None) is not None:
            worker.loading.remove(held)
        worker.slots[held.slot] = None
        heappush(worker.free, held.slot)
        self._touched.add(held.worker)

    def _forget(self, held: Residence) -> None:
        layer, expert = held.expert
        if held.keeps and self._kept[layer].get(expert) is held:
            del self._kept[layer][expert]
            self._residency.left(held.worker, held.expert)

    def _serves(self, held: Residence, demand: Demand) -> bool:
        return self._precision is None or self._precision.serves(held.form, demand.importance)

    def _good(self, demand: Demand) -> Residence | None:
        """Where its expert is kept, in a form that will do. One that will not, and that nobody uses, makes way."""
        layer, expert = demand.expert
        held = self._kept[layer].get(expert)
        if held is None or self._serves(held, demand) or held.users:
            return held
        self.workers[held.worker].idle.pop(held.expert, None)
        self.evict(held)
        return None

    def fill(self) -> None:
        """Begin what loads can begin, worker by worker, ascending."""
        touched = self._touched
        if not touched:
            return
        while touched:  # one may touch another, or itself
            order = sorted(touched) if len(touched) > 1 else tuple(touched)
            touched.clear()
            for number in order:
                worker = self.workers[number]
                if len(worker.loading) > 1:
                    self._clear_link(worker)
                if worker.queue:
                    self._fill(worker)

    def _clear_link(self, worker: Worker) -> None:
        """What is only predicted makes way for a load after it that a gate waits for now."""
        urgent = [place for place, held in enumerate(worker.loading) if held.urgent]
        for held in worker.loading[: urgent[-1]] if urgent else ():
            if not held.urgent:
                self._preempt(worker, held)

    def _fill(self, worker: Worker) -> None:
        """Start loads while there are slots. What the gate has named may pre-empt what is only predicted."""
        queue = worker.queue
        while queue:
            demand = queue[0]
            held = self._good(demand)
            if held is None and not self._may_begin(worker, demand):
                return
            queue.pop(0)
            if held is None:
                self._start(worker, demand)
            else:
                worker.named -= demand.confirmed
                self._join(demand, held)

    def _may_begin(self, worker: Worker, demand: Demand) -> bool:
        """Link and slot are free for its load, or have been made so."""
        if not demand.confirmed:
            if len(worker.loading) >= AHEAD or not (worker.free or worker.idle):
                return False
        elif worker.loading:
            for held in [one for one in worker.loading if not one.urgent]:
                self._preempt(worker, held)
        if self._residency.full(demand.expert) and self._make_way(worker, demand):
            return True
        return bool(worker.free) or self._make_room(worker, demand)

    def _make_way(self, worker: Worker, demand: Demand) -> bool:
        """Its part of the slots is used up: one of those who share it goes."""
        victim = self._residency.victim(worker.number, demand.expert, worker.idle.keys()) if worker.idle else None
        if victim is not None:
            self.evict(worker.idle.pop(victim))
        return victim is not None

    def _make_room(self, worker: Worker, demand: Demand) -> bool:
        if worker.idle:
            victim = self._residency.victim(worker.number, demand.expert, worker.idle.keys())
            if victim is None and demand.confirmed and len(worker.idle) == len(worker.slots):
                victim = next(iter(worker.idle))  # nothing here will leave by itself
            if victim is not None:
                self.evict(worker.idle.pop(victim))
                return True
        held = worker.least_urgent_prefetch() if demand.confirmed else None
        if held is not None:
            self._preempt(worker, held)
        return held is not None

    def _preempt(self, worker: Worker, held: Residence) -> None:
        worker.idle.pop(held.expert, None)
        self.evict(held)
        held.stats.preempted += 1
        for demand in held.users:
            demand.held = None
            worker.enqueue(demand)

    def _start(self, worker: Worker, demand: Demand) -> None:
        request, number, expert = demand.opened.request, worker.number, demand.expert
        slot, load_id = heappop(worker.free), next(self._ids)
        keeps = self._residency.keeps(number, expert, not demand.confirmed)
        form = FULL if self._precision is None else self._precision.form(demand.importance)
        held = Residence(number, slot, expert, load_id, keeps, request.stats, [demand], form)
        demand.held, demand.hit = held, False
        worker.slots[slot] = self.loads[load_id] = held
        worker.loading.append(held)
        if keeps:
            self._kept[expert.layer][expert.expert] = held
        request.stats.load_begun(request.prefilling, demand.reload)
        self._out.append(t.Load(number, slot, expert, load_id, form))
        if demand.confirmed:
            self._ready(demand)

    def _join(self, demand: Demand, held: Residence) -> None:
        """A hit: the demand shares what is there. A warm-up has nothing left to do."""
        if demand.opened.warm_up:
            del demand.opened.demands[demand.seq]
            return
        worker = self.workers[held.worker]
        worker.idle.pop(held.expert, None)
        worker.named += demand.confirmed
        held.users.append(demand)
        demand.worker, demand.held, demand.hit = held.worker, held, True
        if demand.confirmed:
            self._ready(demand)
            if held.loaded:
                self._load_over(demand)
            elif worker.loading[0] is not held:
                self._touched.add(held.worker)


def _mean(values: list[float]) -> float:
    known = [value for value in values if value]
    return sum(known) / len(known) if known else 0.0
