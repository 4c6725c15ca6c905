"""The scheduler: a state machine that turns facts into commands.

`handle(event, now) -> commands`. It never sleeps, reads a clock or sees a tensor: the runtime executes its commands and
feeds facts back, a simulator pops a heap and does the same. Same events, same times: same commands.

Decode (OD-MoE section 3.1): a prediction assigns a layer's experts to the workers of its group; each worker loads what
it is assigned, in order, as its slots come free. When the gate fires, predictions it does not name are dropped, experts
that no prediction named are loaded then, and every named expert is computed once and evicted.
Prefill (section 3.3): every layer's experts are assigned to all workers before its gate, as if all were predicted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from scheduler import types as t
from scheduler.alignment import Alignment
from scheduler.errors import ConfigError
from scheduler.fleet import Need, OpenVisit, State, Worker
from scheduler.follow import Following
from scheduler.ledger import RequestLedger
from scheduler.placement import Placement

MAX_FAILURES = 3
"""An expert whose load or computation failed this often fails its request."""


@dataclass(slots=True)
class _Request:
    """`reached`: (position of the pass under way, ordinal of the last layer whose gate fired in it).
    `planned`: how many layers prefill has assigned."""

    ledger: RequestLedger
    prefilling: bool = True
    reached: tuple[int, int] = (0, -1)
    planned: int = 0


class Core:
    """See the module. `mini_batch`: most rows an expert computes at once in prefill."""

    def __init__(self, shape: t.ModelShape, placement: Placement, alignment: Alignment, mini_batch: int = 128) -> None:
        if mini_batch < 1:
            raise ConfigError(f"mini-batch is {mini_batch}; allowed: 1, 2, ...")
        self.shape = shape
        self.mini_batch = mini_batch
        self.ledgers: dict[int, RequestLedger] = {}
        self._placement = placement
        self._following = Following(alignment)
        self._ordinal = {layer: i for i, layer in enumerate(shape.layers)}
        self._workers: dict[int, Worker] = {}
        self._requests: dict[int, _Request] = {}
        self._visits: dict[t.Visit, OpenVisit] = {}
        self._loads: dict[int, Need] = {}
        self._calls: dict[int, Need] = {}
        self._ids = itertools.count(1)
        self._now = 0.0
        self._out: list[t.Command] = []
        self._handlers: dict[type, Callable[..., None]] = {
            t.WorkerJoined: self._worker_joined,
            t.WorkerLost: self._worker_lost,
            t.ShadowJoined: self._shadow_joined,
            t.ShadowLost: self._shadow_lost,
            t.RequestOpened: self._request_opened,
            t.RequestClosed: self._request_closed,
            t.PassStarted: self._pass_started,
            t.Predicted: self._predicted,
            t.GateFired: self._gate_fired,
            t.LoadEnded: self._load_ended,
            t.LoadFailed: self._load_failed,
            t.ComputeEnded: self._compute_ended,
            t.ComputeFailed: self._compute_failed,
            t.TokenDecoded: self._token_decoded,
        }

    @property
    def alignment(self) -> Alignment:
        return self._following.alignment

    @property
    def workers(self) -> list[int]:
        """The live workers, ascending."""
        return sorted(self._workers)

    def handle(self, event: t.Event, now: float) -> list[t.Command]:
        """One fact in, the commands that follow from it out, in the order in which they must be carried out.

        Facts about what is already over (a load of a lost worker, a request that was closed) yield no commands.
        """
        self._now = now
        self._out = []
        self._handlers[type(event)](event)
        return self._out

    # --- workers ------------------------------------------------------------------------------------------------

    def _worker_joined(self, event: t.WorkerJoined) -> None:
        if event.slots < 1:
            raise ConfigError(f"worker {event.worker} has {event.slots} slots; allowed: 1, 2, ...")
        self._workers[event.worker] = Worker(event.worker, [None] * event.slots)

    def _worker_lost(self, event: t.WorkerLost) -> None:
        lost = self._workers.pop(event.worker, None)
        if lost is None:
            return
        needs = sorted(lost.needs(), key=lambda n: n.urgency)
        if not self._workers:
            for request in list(self._requests):
                self._fail(request, f"the last worker is gone: {event.reason}")
            return
        for need in needs:
            self._reassign(need)
        self._fill_all()

    def _reassign(self, need: Need) -> None:
        """Begin the need again, elsewhere if there is another worker; what the old one still says is not heard."""
        self._forget_ids(need)
        if need.confirmed:
            if need.state is State.RESIDENT:
                self._visits[need.visit].waiting += 1
            need.unsent = self._chunks(need.rows)
        self._workers[self._choose(need.visit, need.worker)].enqueue(need)

    def _forget_ids(self, need: Need) -> None:
        self._loads.pop(need.load_id, None)
        for call in need.calls:
            self._calls.pop(call, None)
        need.calls.clear()

    # --- requests and the shadow --------------------------------------------------------------------------------

    def _request_opened(self, event: t.RequestOpened) -> None:
        self.ledgers[event.request] = RequestLedger(event.prompt_tokens)
        self._requests[event.request] = _Request(self.ledgers[event.request])
        self._out += self._following.opened(event.request, event.prompt_tokens)
        if not self._workers:
            self._fail(event.request, "no worker is connected")

    def _request_closed(self, event: t.RequestClosed) -> None:
        request = self._requests.pop(event.request, None)
        if request is None:
            return
        for visit in [v for v in self._visits if v.request == event.request]:
            for need in self._visits.pop(visit).needs.values():
                self._drop(need)
        self._out += self._following.closed(event.request)
        self._fill_all()

    def _fail(self, request: int, reason: str) -> None:
        self._request_closed(t.RequestClosed(request))
        self._out.append(t.Fail(request, reason))

    def _shadow_joined(self, event: t.ShadowJoined) -> None:
        self._out += self._following.joined()

    def _shadow_lost(self, event: t.ShadowLost) -> None:
        self._following.lost()
        for request in self._requests.values():
            request.ledger.orphan()

    def _token_decoded(self, event: t.TokenDecoded) -> None:
        request = self._requests.get(event.request)
        if request is not None:
            request.prefilling = False
            self._out += self._following.decoded(event.request, event.index)

    # --- passes and predictions ---------------------------------------------------------------------------------

    def _pass_started(self, event: t.PassStarted) -> None:
        request = self._requests.get(event.request)
        if request is None:
            return
        request.reached = (event.position, -1)
        request.prefilling = event.prefill
        if event.prefill:
            self._plan_prefill(event.request, event.position, 0)
            self._fill_all()

    def _horizon(self) -> int:
        """How many layers ahead prefill assigns: enough to fill every slot while one layer computes."""
        slots = sum(len(worker.slots) for worker in self._workers.values())
        return 1 + -(-slots // self.shape.experts)

    def _plan_prefill(self, number: int, position: int, start: int) -> None:
        """Assign layers from ordinal `start` to the horizon, those that are not assigned yet."""
        request, stop = self._requests[number], min(start + self._horizon(), len(self.shape.layers))
        for ordinal in range(request.planned, stop):
            visit = t.Visit(number, position, self.shape.layers[ordinal])
            self._visits[visit] = OpenVisit()
            for expert, worker in enumerate(self._placement.share(self.workers, ordinal, self.shape.count(ordinal))):
                self._add(visit, expert, worker)
        request.planned = max(request.planned, stop)

    def _predicted(self, event: t.Predicted) -> None:
        request = self._requests.get(event.request)
        if request is None:
            return
        visit = t.Visit(event.request, event.position, event.layer)
        request.ledger.predicted(visit, event.experts)
        if (event.position, self._ordinal[event.layer]) <= request.reached:
            request.ledger.late += 1
            return
        opened = self._visits.setdefault(visit, OpenVisit())
        for expert in [e for e in opened.needs if e not in event.experts]:
            self._drop(opened.needs.pop(expert))
        group = self._placement.group(self.workers, self._turn(visit))
        for place, expert in enumerate(event.experts):
            if expert not in opened.needs:
                self._add(visit, expert, group[place % len(group)])
        self._fill_all()

    def _turn(self, visit: t.Visit) -> int:
        return visit.position * len(self.shape.layers) + self._ordinal[visit.layer]

    def _add(self, visit: t.Visit, expert: int, worker: int) -> Need:
        need = Need(next(self._ids), visit, t.ExpertId(visit.layer, expert), worker)
        self._visits[visit].needs[expert] = need
        self._workers[worker].enqueue(need)
        return need

    # --- the gate -----------------------------------------------------------------------------------------------

    def _gate_fired(self, event: t.GateFired) -> None:
        request = self._requests.get(event.visit.request)
        if request is None:
            return
        opened = self._visits.setdefault(event.visit, OpenVisit())
        opened.since = self._now
        request.reached = (event.visit.position, self._ordinal[event.visit.layer])
        named = frozenset(expert for expert, _ in event.rows)
        if not request.prefilling and self._following.present:
            request.ledger.activated(event.visit, named)
            request.ledger.in_time += len(named & opened.needs.keys())
        for expert in [e for e in opened.needs if e not in named]:
            wrong = opened.needs.pop(expert)
            request.ledger.unused += wrong.state is not State.QUEUED
            self._drop(wrong)
        for expert, rows in sorted(event.rows, key=lambda row: row[0] not in opened.needs):  # predicted ones first
            self._confirm(opened.needs.get(expert) or self._add_missed(event.visit, expert), rows)
        opened.left = len(event.rows)
        opened.waiting = sum(need.state is not State.RESIDENT for need in opened.needs.values())
        if request.prefilling:
            self._plan_prefill(event.visit.request, event.visit.position, self._ordinal[event.visit.layer] + 1)
        if not event.rows:
            self._finish(event.visit)
        self._fill_all()

    def _add_missed(self, visit: t.Visit, expert: int) -> Need:
        need = self._add(visit, expert, self._choose(visit))
        need.late = expert not in self._visits[visit].let_go
        return need

    def _choose(self, visit: t.Visit, shun: int | None = None) -> int:
        """The worker for an expert that nobody was assigned: least named work, then a free slot, then its group."""
        ring = self._placement.ring(self.workers, self._turn(visit))
        return min(ring, key=lambda w: (w == shun, self._workers[w].confirmed, self._workers[w].free_slot() is None))

    def _confirm(self, need: Need, rows: int) -> None:
        worker = self._workers[need.worker]
        if need.state is State.QUEUED:
            worker.queue.remove(need)
        need.confirmed, need.rows, need.unsent = True, rows, self._chunks(rows)
        if need.state is State.QUEUED:
            worker.enqueue(need)
        else:
            self._send(need)

    def _chunks(self, rows: int) -> list[tuple[int, int]]:
        return [(start, min(start + self.mini_batch, rows)) for start in range(0, rows, self.mini_batch)]

    def _send(self, need: Need) -> None:
        """Send all rows; the worker holds them until its load has ended."""
        for start, stop in need.unsent:
            call = next(self._ids)
            need.calls.add(call)
            self._calls[call] = need
            last = stop == need.rows
            self._out.append(t.Compute(need.worker, need.slot, need.expert, call, need.visit, start, stop, last))
        need.unsent = []

    # --- loads and computations ---------------------------------------------------------------------------------

    def _load_ended(self, event: t.LoadEnded) -> None:
        need = self._loads.pop(event.load_id, None)
        if need is None:
            return
        need.state = State.RESIDENT
        self._requests[need.visit.request].ledger.bytes_loaded += event.nbytes
        if need.confirmed:
            self._loaded_late(need)

    def _loaded_late(self, need: Need) -> None:
        """A load that its gate was waiting for has ended."""
        opened, request = self._visits[need.visit], self._requests[need.visit.request]
        opened.waiting -= 1
        if opened.waiting == 0:
            request.ledger.stalled(self._now - opened.since, request.prefilling)
            opened.since = self._now

    def _load_failed(self, event: t.LoadFailed) -> None:
        need = self._loads.get(event.load_id)
        if need is not None:
            self._retry(need, event.reason)

    def _compute_ended(self, event: t.ComputeEnded) -> None:
        need = self._calls.pop(event.call_id, None)
        if need is None:
            return
        need.calls.discard(event.call_id)
        if need.calls or need.unsent:
            return
        if self._loads.pop(need.load_id, None) is not None:
            self._loaded_late(need)  # the word of its load was lost or is still on its way
        self._workers[need.worker].slots[need.slot] = None
        opened = self._visits[need.visit]
        del opened.needs[need.expert.expert]
        opened.left -= 1
        if opened.left == 0:
            self._finish(need.visit)
        self._fill(self._workers[need.worker])

    def _compute_failed(self, event: t.ComputeFailed) -> None:
        need = self._calls.get(event.call_id)
        if need is not None:
            self._retry(need, event.reason)

    def _retry(self, need: Need, reason: str) -> None:
        """Elsewhere, not for ever. What was only predicted is then let go: if the gate names it, it is tried again."""
        layer, expert = need.expert
        need.failures += 1
        if need.failures >= MAX_FAILURES and not need.confirmed:
            opened = self._visits[need.visit]
            opened.let_go.add(expert)
            self._drop(opened.needs.pop(expert))
            self._fill_all()
            return
        if need.failures >= MAX_FAILURES:
            self._fail(need.visit.request, f"expert {expert} of layer {layer} failed {need.failures} times: {reason}")
            return
        worker = self._workers[need.worker]
        self._out.append(t.Evict(need.worker, need.slot, need.expert))
        worker.slots[need.slot] = None
        self._reassign(need)
        self._fill_all()

    def _finish(self, visit: t.Visit) -> None:
        del self._visits[visit]
        self._out.append(t.Resume(visit))

    def _drop(self, need: Need) -> None:
        """Take a need off its worker; what is in a slot is evicted."""
        self._forget_ids(need)
        worker = self._workers.get(need.worker)
        if worker is None:
            return
        if need.state is State.QUEUED:
            worker.queue.remove(need)
        else:
            worker.slots[need.slot] = None
            self._out.append(t.Evict(need.worker, need.slot, need.expert))

    def _fill_all(self) -> None:
        for number in self.workers:
            self._fill(self._workers[number])

    def _fill(self, worker: Worker) -> None:
        """Start loads while there are slots. What the gate has named may displace what is only predicted."""
        while worker.queue:
            need = worker.queue[0]
            slot = worker.free_slot()
            if slot is None and need.confirmed:
                slot = self._displace(worker)
            if slot is None:
                return
            worker.queue.pop(0)
            self._start(worker, slot, need)

    def _displace(self, worker: Worker) -> int | None:
        victim = worker.furthest_prediction()
        if victim is None:
            return None
        slot = victim.slot
        self._requests[victim.visit.request].ledger.displaced += 1
        self._loads.pop(victim.load_id, None)
        self._out.append(t.Evict(worker.number, slot, victim.expert))
        worker.slots[slot] = None
        worker.enqueue(victim)
        return slot

    def _start(self, worker: Worker, slot: int, need: Need) -> None:
        request = self._requests[need.visit.request]
        need.state, need.slot, need.load_id = State.LOADING, slot, next(self._ids)
        worker.slots[slot] = need
        self._loads[need.load_id] = need
        request.ledger.load_begun(request.prefilling, need.late)
        self._out.append(t.Load(worker.number, slot, need.expert, need.load_id))
        if need.confirmed:
            self._send(need)
