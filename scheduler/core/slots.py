"""What is in which slot and what waits for one: loads begin here, are shared, and make room for each other.

A worker's link carries one load at a time. `PREFETCHES` prefetches are in flight on it at once, so that it never rests.
A demand load, which a gate waits for, starts at once and pre-empts every prefetch in flight.

Demands of several visits share an expert in a slot: always where it is kept; else where they are needed in the same
layer of the same step, or where a gate has chosen it and it is there anyway. It is evicted with the last of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush

from scheduler.core.audits import AuditTable
from scheduler.core.commands import Commands
from scheduler.core.dispatch import RowDispatcher
from scheduler.core.state import Demand, LayerVisit, SlotEntry, State, Worker
from scheduler.core.workers import WorkerTable
from scheduler.policies.importance import LayerImportance
from scheduler.policies.precision import FULL, Importance, form_taken
from scheduler.policies.strategy import Strategy
from scheduler.types import ExpertId

PREFETCHES = 2


class SlotTable:
    """Brings demands into slots.

    Its methods change what stands in slots and queues; loads begin in `fill`, once after each event. Work is
    proportional to what the event touches: only workers where a slot came free or a demand was queued are looked at.
    """

    def __init__(
        self,
        state: State,
        commands: Commands,
        workers: WorkerTable,
        rows: RowDispatcher,
        audits: AuditTable,
        strategy: Strategy,
    ) -> None:
        self._state = state
        self._commands = commands
        self._workers = workers
        self._rows = rows
        self._audits = audits
        self._residency = strategy.residency
        self._precision = strategy.precision if strategy.precision.forms != (FULL,) else None
        self.forms: set[str] = set()
        """Those in which loads have begun so far."""

    def resident(self, layer: int) -> dict[int, SlotEntry]:
        """Expert -> where it is kept, loads in flight included."""
        return self._state.kept[layer]

    def present(self, layer: int, importance: LayerImportance | None = None) -> set[int]:
        """Experts whose bytes are in a slot: in a form that is good enough for a visit of that importance; None: in
        whatever form."""
        passing = [one for expert, entries in self._state.passing.items() if expert.layer == layer for one in entries]
        there = [entry for entry in (*self._state.kept[layer].values(), *passing) if entry.loaded]
        if importance is not None:
            there = [entry for entry in there if self._serves(entry, importance.importance_of(entry.expert.expert))]
        return {entry.expert.expert for entry in there}

    # --- demands ------------------------------------------------------------------------------------------------

    def place_on_host(self, demand: Demand) -> None:
        """It is computed where its expert lies, at the host place with the smallest backlog of those that hold it."""
        worker = self._workers.least_busy_host(demand.expert)
        worker.hosted[demand.seq] = demand
        worker.backlog += 1
        demand.move_to_host(worker.number)
        self._rows.on_ready(demand)

    def place(self, demand: Demand, number: int | None = None, avoid: int | None = None) -> None:
        """Share its expert where that is in a slot; else queue it beside another demand for it, else where
        `WorkerTable.choose` says. While workers are missing, or none holds the expert, it waits without a worker; a
        suspect also while another is tried."""
        if demand.lost and demand.confirmed:
            if self._state.tried not in (None, demand):
                self._state.wait(demand)
                return
            self._state.tried = demand
        entry = self._entry_for(demand)
        if entry is not None:
            self._share(demand, entry)
            return
        if self._state.shortfall is not None:
            self._state.wait(demand)
            return
        twin = self._twin_of(demand)
        number = twin.worker if twin is not None else self._workers.choose(demand, number, avoid)
        if number is None:
            self._state.lack(demand)
            return
        spread = self._state.spread.get(demand.visit.due)
        if spread is not None and twin is None:
            spread[number] += 1
        worker = self._state.workers[number]
        self._enqueue(worker, demand)
        worker.backlog += demand.confirmed
        room = worker.free or worker.idle or self._audits.loading(number)
        if room or demand.confirmed or self._state.step.absent:  # else it pre-empts nothing
            self._state.touched.add(number)

    def spread_anew(self, visits: list[LayerVisit]) -> None:
        """What is queued for these visits, which are due together, goes to the workers that have least to load for
        them."""
        demands = [demand for visit in visits for demand in visit.demands.values()]
        queued = [demand for demand in demands if demand.state == "queued" and demand.worker >= 0]
        for demand in queued:
            self._withdraw(demand)
        placed = {demand.expert: demand.worker for demand in demands if demand.entry is not None}
        self._state.spread[visits[0].due] = Counter(placed.values())
        for demand in queued:
            self.place(demand, self._workers.spread(demand.visit))

    def attach(self, demand: Demand) -> None:
        """If it is queued and its expert is in a slot, share that."""
        entry = self._entry_for(demand) if demand.entry is None else None
        if entry is not None:
            self._withdraw(demand)
            self._share(demand, entry)

    def _twin_of(self, demand: Demand, loading: bool = False) -> Demand | None:
        """A queued demand for the same expert in the same layer of the same step. `loading`: or one that a gate has
        chosen, wherever it waits: it takes what is loaded first."""
        queued, due = self._state.queued.get(demand.expert), demand.visit.due
        if not queued:
            return None
        others = (one for one in queued if one.origin != "warm-up")
        return next((one for one in others if one.visit.due == due or (loading and one.confirmed)), None)

    def _enqueue(self, worker: Worker, demand: Demand) -> None:
        worker.enqueue(demand)
        self._state.queued.setdefault(demand.expert, []).append(demand)

    def _dequeue(self, worker: Worker | None, demand: Demand) -> None:
        """`worker`: None where it is lost, with its queue."""
        if worker is not None:
            worker.queue.remove(demand)
        queued = self._state.queued[demand.expert]
        queued.remove(demand)
        if not queued:
            del self._state.queued[demand.expert]

    def _withdraw(self, demand: Demand) -> None:
        """It is queued at its worker, or waits for one: no longer."""
        if demand.worker < 0:
            self._state.waiting.pop(demand.seq, None)
            self._state.unheld.pop(demand.seq, None)
        else:
            self._dequeue(self._state.workers.get(demand.worker), demand)

    def reorder(self) -> None:
        """The urgency of queued demands has changed."""
        for number, worker in self._state.workers.items():
            if worker.queue:
                worker.reorder()
                self._state.touched.add(number)

    def confirm(self, demand: Demand) -> None:
        """The gate has chosen what was prefetched, or queued for it."""
        number, entry = demand.worker, demand.entry
        if entry is None:
            self._withdraw(demand)
        elif len(entry.users) == 1 and not self._serves(entry, demand.importance):
            self.evict(entry)
            demand.requeue()
            entry = None
        demand.confirmed = True
        if entry is None:
            self.place(demand, number)  # which shares what was loaded for a later step
            return
        worker = self._state.workers[number]
        worker.backlog += 1
        self._rows.on_ready(demand)
        if entry.loaded:
            demand.visit.on_loaded(self._state.now)
        elif worker.link[0] is not entry:
            self._state.touched.add(worker.number)

    def cancel(self, demand: Demand) -> None:
        """No visit needs it any more. Its expert is evicted, unless it is kept or shared."""
        self._state.end_trial(demand)
        self._rows.forget(demand)
        entry = demand.entry
        self.detach(demand)
        demand.end()
        if entry is None:
            return
        if entry.keeps or entry.users:
            self._release(entry)
        else:
            self.evict(entry)

    def detach(self, demand: Demand) -> None:
        """Take it off its worker, whatever becomes of its slot."""
        worker, entry = self._state.workers.get(demand.worker), demand.entry
        if worker is not None:
            worker.backlog -= demand.confirmed
            if demand.state == "hosted":
                del worker.hosted[demand.seq]
        if demand.state == "queued":
            self._withdraw(demand)
        if entry is not None:
            entry.users.remove(demand)
            if entry.last is demand:
                entry.last = None
        demand.entry, demand.worker = None, -1

    def requeue(self, demand: Demand) -> None:
        """It begins again, from its load; answers that its worker still owes are ignored. `place` it then."""
        if demand.confirmed:
            demand.visit.missing += demand.state in ("ready", "hosted")
            self._rows.on_load_over(demand.visit)
        self._rows.forget(demand)
        self.detach(demand)
        demand.requeue()

    def on_computed(self, demand: Demand) -> None:
        """Its last row has come back. If that was the last demand for an expert that is not kept, the slot is free."""
        self._state.end_trial(demand)
        entry = demand.entry
        if entry is None:  # hosted
            self.detach(demand)
            demand.end()
            return
        worker = self._state.workers[entry.worker]
        worker.backlog -= 1
        entry.users.remove(demand)
        demand.end()
        if entry.keeps:
            self._release(entry)
        elif entry.users:
            self._state.touched.add(entry.worker)  # if only prefetches are left, a demand load may pre-empt them
        elif entry.last is demand:  # the worker has evicted it
            self._forget(entry)
            worker.slots[entry.slot] = None
            heappush(worker.free, entry.slot)
            if worker.queue:
                self._state.touched.add(worker.number)
        else:
            self.evict(entry)

    # --- slots --------------------------------------------------------------------------------------------------

    def on_loaded(self, entry: SlotEntry) -> None:
        """Its bytes are in the slot, and its worker's link is free for the next load."""
        entry.loaded = True
        del self._state.loads[entry.load_id]
        if entry.host_slot is not None:
            self._workers.host_memory.on_loaded(entry.worker, entry.expert, entry.load_id)
        worker = self._state.workers[entry.worker]
        worker.end_load(entry, self._state.now)
        if worker.queue and (worker.free or worker.idle or worker.queue[0].confirmed or self._state.step.absent):
            self._state.touched.add(entry.worker)
        for demand in list(entry.users):
            demand.finish_load()
            if demand.origin == "warm-up":
                del demand.visit.demands[demand.seq]
                self.cancel(demand)
            elif demand.confirmed:
                demand.visit.on_loaded(self._state.now)
                self._rows.on_load_over(demand.visit)

    def evict(self, entry: SlotEntry) -> None:
        """Free its slot; a load in flight is given up."""
        self._commands.evict(entry)
        self._audits.on_evicted(entry)
        self._forget(entry)
        worker = self._state.workers[entry.worker]
        if worker.idle.get(entry.expert) is entry:
            del worker.idle[entry.expert]
        if self._state.loads.pop(entry.load_id, None) is not None:
            self._workers.host_memory.on_given_up(entry.worker, entry.expert, entry.load_id)
            worker.end_load(entry, self._state.now)
        worker.slots[entry.slot] = None
        heappush(worker.free, entry.slot)
        self._state.touched.add(entry.worker)

    def invalidate(self, entry: SlotEntry) -> None:
        """Its load or a computation on it has failed: it may not stay. Unless a demand shares it, it goes at once."""
        self._forget(entry)
        self._workers.host_memory.on_doubted(entry.worker, entry.expert)
        entry.keeps, entry.leaving = False, True
        if not entry.users:
            self.evict(entry)

    def on_worker_lost(self, worker: Worker) -> None:
        """Its loads are over, and what it kept is gone."""
        self._state.touched.discard(worker.number)
        for entry in worker.slots:
            if entry is not None:
                self._state.loads.pop(entry.load_id, None)
                self._forget(entry)

    def _release(self, entry: SlotEntry) -> None:
        """It is kept, and one demand fewer needs it."""
        if not entry.users:
            self._state.workers[entry.worker].idle[entry.expert] = entry
        self._state.touched.add(entry.worker)

    def _forget(self, entry: SlotEntry) -> None:
        """No more demands may share it."""
        layer, expert = entry.expert
        if entry.keeps:
            if self._state.kept[layer].get(expert) is entry:
                del self._state.kept[layer][expert]
                self._residency.on_left(entry.worker, entry.expert)
            return
        passing = self._state.passing.get(entry.expert)
        if passing is not None and entry in passing:
            passing.remove(entry)
            if not passing:
                del self._state.passing[entry.expert]

    def _serves(self, entry: SlotEntry, importance: Importance) -> bool:
        """Its form is good enough for an expert of that importance."""
        return self._precision is None or self._precision.serves(entry.form, importance)

    def _entry_for(self, demand: Demand) -> SlotEntry | None:
        """Where its expert is, in a form that serves, and may be shared. Where it is kept in another form, and no
        demand uses it, it is evicted."""
        layer, expert = demand.expert
        entry = self._state.kept[layer].get(expert)
        if entry is None:
            return self._passing_entry_for(demand) if demand.expert in self._state.passing else None
        if self._serves(entry, demand.importance) or entry.users:
            return entry
        self.evict(entry)
        return None

    def _passing_entry_for(self, demand: Demand) -> SlotEntry | None:
        """A prefetch shares only what is needed at the same time: it would otherwise keep the slot until its turn."""
        passing, due = self._state.passing[demand.expert], demand.visit.due
        shared = [one for one in passing if not one.leaving and self._serves(one, demand.importance)]
        same = next((one for one in shared if any(user.visit.due == due for user in one.users)), None)
        if same is None and demand.confirmed and shared:
            return shared[0]
        return same

    # --- loads --------------------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Begin what loads can begin, worker by worker, ascending."""
        touched = self._state.touched
        while touched:  # one may touch another, or itself
            order = sorted(touched) if len(touched) > 1 else tuple(touched)
            touched.clear()
            for number in order:
                worker = self._state.workers[number]
                if len(worker.link) > 1:
                    self._clear_link(worker)
                if worker.queue:
                    self._fill(worker)

    def _clear_link(self, worker: Worker) -> None:
        """A demand load is behind prefetches: those are pre-empted."""
        last = max((place for place, entry in enumerate(worker.link) if entry.is_confirmed), default=0)
        for entry in worker.link[:last]:
            if not entry.is_confirmed:
                self._preempt(worker, entry)

    def _fill(self, worker: Worker) -> None:
        """Begin loads while there are slots."""
        queue = worker.queue
        while queue:
            demand = queue[0]
            entry = self._entry_for(demand)
            if entry is None and not self._may_begin(worker, demand):
                return
            self._dequeue(worker, demand)
            if entry is None:
                self._begin_load(worker, demand)
            else:
                worker.backlog -= demand.confirmed
                self._share(demand, entry)

    def _may_begin(self, worker: Worker, demand: Demand) -> bool:
        """Link and slot are free for its load, or have been made so."""
        self._audits.give_way(worker)
        if not demand.confirmed:
            absent = self._state.step.absent
            if len(worker.link) >= PREFETCHES and not (absent and self._put_off(worker, worker.link, demand)):
                return False
            if not (worker.free or worker.idle or absent):
                return False
        elif worker.link:
            for entry in [one for one in worker.link if not one.is_confirmed]:
                self._preempt(worker, entry)
        if self._residency.full(demand.expert) and self._make_way(worker, demand):
            return True
        return bool(worker.free) or self._make_room(worker, demand)

    def _make_way(self, worker: Worker, demand: Demand) -> bool:
        """Its share of the slots is used up: one of those that share it is evicted, though another slot may be free."""
        victim = self._residency.victim(worker.number, demand.expert, worker.idle.keys()) if worker.idle else None
        if victim is not None:
            self.evict(worker.idle[victim])
        return victim is not None

    def _make_room(self, worker: Worker, demand: Demand) -> bool:
        """No slot is free: the residency's victim is evicted, or the least urgent prefetch is pre-empted. A prefetch
        pre-empts only those of requests that are not in the step."""
        if worker.idle:
            victim = self._residency.victim(worker.number, demand.expert, worker.idle.keys())
            if victim is None and demand.confirmed and len(worker.idle) == len(worker.slots):
                victim = next(iter(worker.idle))  # nothing here will leave by itself
            if victim is not None:
                self.evict(worker.idle[victim])
                return True
        if not demand.confirmed and not self._state.step.absent:
            return False
        return self._put_off(worker, worker.slots, demand)

    def _put_off(self, worker: Worker, entries: Sequence[SlotEntry | None], demand: Demand) -> bool:
        """The least urgent prefetch among these is pre-empted, if it is of a less urgent kind than the demand."""
        entry = worker.least_urgent_prefetch(entries)
        if entry is None or entry.urgency[0] <= demand.urgency[0]:
            return False
        self._preempt(worker, entry)
        return True

    def _preempt(self, worker: Worker, entry: SlotEntry) -> None:
        self.evict(entry)
        entry.stats.preempted += 1
        for demand in entry.users:
            demand.requeue()
            stays = self._workers.holders.holds(worker.number, demand.expert)
            self._enqueue(worker, demand) if stays else self.place(demand)

    def _begin_load(self, worker: Worker, demand: Demand) -> None:
        """A warm-up whose expert may not stay is over without a load."""
        request, number, expert = demand.visit.request, worker.number, demand.expert
        keeps = self._residency.keeps(number, expert, not demand.confirmed)
        if demand.origin == "warm-up" and not keeps:  # it would be evicted as soon as it is loaded
            demand.end_warm_up()
            return
        slot, load_id, form = heappop(worker.free), self._commands.next_id(), FULL
        if self._precision is not None:
            form = form_taken(self._precision.form(demand.importance), worker.joined.forms)
        self.forms.add(form)
        entry = SlotEntry(number, slot, expert, load_id, keeps, request.stats, [demand], form)
        if (host := self._workers.host_memory).memories:
            entry.host_slot, entry.in_memory = host.assign(number, expert, form, load_id, not demand.confirmed)
        demand.start_load(entry)
        worker.slots[slot] = self._state.loads[load_id] = entry
        worker.append_load(entry, self._state.now)
        if keeps:
            self._workers.sticks = True
            self._state.kept[expert.layer][expert.expert] = entry
            self._end_warm_ups(expert)
        else:
            self._state.passing.setdefault(expert, []).append(entry)
        request.stats.add_load(request.prefilling, demand.origin == "gate", entry.in_memory)
        self._commands.load(entry)
        twins = self._dequeue_twins(demand) if expert in self._state.queued else []
        entry.users += twins  # before rows are sent: the last of them evicts
        if demand.confirmed:
            self._rows.on_ready(demand)
        for twin in twins:
            self._share(twin, entry)

    def _end_warm_ups(self, expert: ExpertId) -> None:
        """It is on its way to a slot where it may stay: no other request's warm-up needs to bring it."""
        for one in [one for one in self._state.queued.get(expert, ()) if one.origin == "warm-up"]:
            self._dequeue(self._state.workers[one.worker], one)
            one.end_warm_up()

    def _dequeue_twins(self, demand: Demand) -> list[Demand]:
        """Those that share its load from the beginning."""
        twins = []
        while (twin := self._twin_of(demand, loading=True)) is not None:
            worker = self._state.workers[twin.worker]
            worker.backlog -= twin.confirmed
            self._dequeue(worker, twin)
            twins.append(twin)
        return twins

    def _share(self, demand: Demand, entry: SlotEntry) -> None:
        """A hit: no load is begun for it. A warm-up is over with that."""
        if demand.origin == "warm-up":
            demand.end_warm_up()
            return
        worker = self._state.workers[entry.worker]
        worker.idle.pop(entry.expert, None)
        worker.backlog += demand.confirmed
        if demand not in entry.users:
            entry.users.append(demand)
        demand.share(entry)
        if demand.confirmed:
            self._rows.on_ready(demand)
            if entry.loaded:
                demand.visit.on_loaded(self._state.now)
            elif worker.link[0] is not entry:
                self._state.touched.add(entry.worker)
