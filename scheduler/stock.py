"""What stands in which slot and what waits for one: loads begin here, are shared, and make room for each other.

Work is proportional to what an event touches: workers where a slot came free or a need was queued are remembered, and
only they are looked at when loads may begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from scheduler import types as t
from scheduler.errors import ConfigError
from scheduler.fleet import Held, Need, Worker
from scheduler.homes import Homes
from scheduler.placement import Placement
from scheduler.residency import Residency


class Stock:
    """`out`: takes the commands. `ready` is told of each need that the gate has named and that has its slot.

    `live`: the workers' numbers, ascending. `total`: slots of all workers. `loads`: those under way, by their ids.
    """

    def __init__(
        self, shape: t.ModelShape, placement: Placement, residency: Residency, ids: Iterator[int],
        out: list[t.Command], ready: Callable[[Need], None],
    ) -> None:  # fmt: skip
        self.workers: dict[int, Worker] = {}
        self.live: tuple[int, ...] = ()
        self.total = 0
        self.loads: dict[int, Held] = {}
        self._shape = shape
        self._placement = placement
        self._residency = residency
        self._homes = Homes(shape) if residency.homed else None
        self._ids = ids
        self._out = out
        self._ready = ready
        self._kept: dict[t.ExpertId, Held] = {}
        self._touched: set[int] = set()

    # --- workers ------------------------------------------------------------------------------------------------

    def joined(self, number: int, slots: int) -> None:
        self.workers[number] = Worker(number, [None] * slots, list(range(slots)))
        if self._homes is not None:
            self._homes.joined(number, slots)
        self.live = tuple(sorted(self.workers))
        self.total += slots

    def lost(self, number: int) -> Worker | None:
        """Its loads are over, and what it kept is gone. Its needs are the caller's to `detach` and bring elsewhere."""
        worker = self.workers.pop(number, None)
        if worker is None:
            return None
        self.live = tuple(n for n in self.live if n != number)
        self.total -= len(worker.slots)
        self._touched.discard(number)
        for held in worker.slots:
            if held is not None:
                self.loads.pop(held.load_id, None)
                self._forget(held)
        if self._homes is not None:
            self._homes.lost(number)
        return worker

    def lacks(self) -> str | None:
        """Why these workers cannot hold what must stay."""
        try:
            self._residency.check(self._shape, self.total)
        except ConfigError as error:
            return str(error)
        if self._homes is not None:
            self._homes.settle()
        return None

    # --- needs --------------------------------------------------------------------------------------------------

    def want(self, need: Need, number: int | None = None, shun: int | None = None) -> None:
        """It goes where its expert is kept, or has its home, else to worker `number`, else to whom `_choose` finds."""
        held = self._kept.get(need.expert) if self._kept else None
        if held is not None:
            self._join(need, held)
            return
        if self._homes is not None:
            number = self._homes.of(need.expert)
        elif number is None:
            number = self._choose(need.opened.turn, shun)
        worker = self.workers[number]
        worker.enqueue(need)
        worker.named += need.confirmed
        if worker.free or worker.idle or need.confirmed:  # what is only predicted displaces nobody
            self._touched.add(number)

    def _choose(self, turn: int, shun: int | None) -> int:
        """The worker for an expert that nobody was assigned: least named work, then a free slot, then its group."""
        best, least = -1, (True, 1 << 60, True)
        for number in self._placement.ring(self.live, turn):
            worker = self.workers[number]
            key = number == shun, worker.named, not (worker.free or worker.idle)
            if key < least:
                best, least = number, key
                if key == (False, 0, False):
                    break
        return best

    def confirm(self, need: Need) -> None:
        """The gate has named what was predicted."""
        worker = self.workers[need.worker]
        worker.named += 1
        if need.held is not None:
            need.confirmed = True
            self._ready(need)
            return
        worker.queue.remove(need)
        need.confirmed = True
        worker.enqueue(need)
        self._touched.add(need.worker)

    def drop(self, need: Need) -> None:
        """Nobody wants it any more; what was in a slot for it alone, and is not kept, is evicted."""
        held = need.held
        worker = self.workers.get(need.worker)
        if held is None:
            if worker is not None:
                worker.queue.remove(need)
                worker.named -= need.confirmed
            return
        self.detach(need)
        if held.keeps or held.users:
            self._one_less(held)
        else:
            self.evict(held)

    def computed(self, held: Held, need: Need) -> None:
        """Its last row has come back; a slot that is not kept has been left."""
        worker = self.workers[held.worker]
        worker.named -= 1
        held.users.remove(need)
        need.held = None
        if not held.keeps:
            worker.slots[held.slot] = None
            heappush(worker.free, held.slot)
            if worker.queue:
                self._touched.add(held.worker)
        else:
            self._one_less(held)

    def detach(self, need: Need) -> None:
        """Take it out of its slot, whatever becomes of that."""
        if need.held is not None:
            need.held.users.remove(need)
            need.held = None
        worker = self.workers.get(need.worker)
        if worker is not None:
            worker.named -= need.confirmed

    # --- slots --------------------------------------------------------------------------------------------------

    def evict(self, held: Held) -> None:
        self._out.append(t.Evict(held.worker, held.slot, held.expert))
        self._vacate(held)

    def spoil(self, held: Held) -> None:
        """Something failed in its slot: it may not stay. Where nobody needs it, it goes at once."""
        self._forget(held)
        held.keeps = False
        if not held.users:
            self.workers[held.worker].idle.pop(held.expert, None)
            self.evict(held)

    def _one_less(self, held: Held) -> None:
        """Kept, and needed by nobody now, or by predictions only, which can be put off."""
        worker = self.workers[held.worker]
        if not held.users:
            worker.idle[held.expert] = held
        self._touched.add(held.worker)

    def _vacate(self, held: Held) -> None:
        self.loads.pop(held.load_id, None)
        self._forget(held)
        worker = self.workers[held.worker]
        worker.slots[held.slot] = None
        heappush(worker.free, held.slot)
        self._touched.add(held.worker)

    def _forget(self, held: Held) -> None:
        if held.keeps and self._kept.pop(held.expert, None) is not None:
            self._residency.left(held.worker, held.expert)

    def fill(self) -> None:
        """Begin what loads can begin, worker by worker, ascending."""
        touched = self._touched
        if not touched:
            return
        for number in sorted(touched) if len(touched) > 1 else tuple(touched):
            self._fill(self.workers[number])
        touched.clear()

    def _fill(self, worker: Worker) -> None:
        """Start loads while there are slots. What the gate has named may displace what is only predicted."""
        queue = worker.queue
        while queue:
            need = queue[0]
            held = self._kept.get(need.expert) if self._kept else None
            if held is None and not worker.free and not self._make_room(worker, need):
                return
            queue.pop(0)
            if held is None:
                self._start(worker, need)
            else:
                worker.named -= need.confirmed
                self._join(need, held)

    def _make_room(self, worker: Worker, need: Need) -> bool:
        if worker.idle:
            victim = self._residency.victim(worker.number, need.expert, worker.idle.keys())
            if victim is None and need.confirmed and len(worker.idle) == len(worker.slots):
                victim = next(iter(worker.idle))  # nothing here will leave by itself
            if victim is not None:
                self.evict(worker.idle.pop(victim))
                return True
        held = worker.furthest_prediction() if need.confirmed else None
        if held is not None:
            self._put_off(worker, held)
        return held is not None

    def _put_off(self, worker: Worker, held: Held) -> None:
        self.evict(held)
        held.ledger.displaced += 1
        for need in held.users:
            need.held = None
            worker.enqueue(need)

    def _start(self, worker: Worker, need: Need) -> None:
        request, number, expert = need.opened.request, worker.number, need.expert
        slot, load_id = heappop(worker.free), next(self._ids)
        keeps = self._residency.keeps(number, expert)
        held = Held(number, slot, expert, load_id, keeps, request.ledger, [need])
        need.held, need.hit = held, False
        worker.slots[slot] = self.loads[load_id] = held
        if keeps:
            self._kept[expert] = held
        request.ledger.load_begun(request.prefilling, need.late)
        self._out.append(t.Load(number, slot, expert, load_id))
        if need.confirmed:
            self._ready(need)

    def _join(self, need: Need, held: Held) -> None:
        """A hit: the need shares what is there."""
        worker = self.workers[held.worker]
        worker.idle.pop(held.expert, None)
        worker.named += need.confirmed
        held.users.append(need)
        need.worker, need.held, need.hit = held.worker, held, True
        if need.confirmed:
            self._ready(need)
