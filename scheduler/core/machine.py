"""The scheduler: a state machine that turns facts into commands.

`handle(event, now) -> commands`. It never sleeps, reads a clock or sees a tensor. The runtime carries out its commands
and feeds facts back; the simulator does the same from a heap. Same events, same times: same commands.

Decode (OD-MoE section 3.1): a prediction assigns a layer's experts to the workers of its group. Each worker loads what
it is assigned, in order, as its slots come free. When the gate fires, wrong predictions are cancelled, experts that no
prediction named are loaded then, and every chosen expert is computed once and evicted.

Prefill (section 3.3) has three ways:

- `ahead`: every layer's experts are assigned to all workers before its gate, as if all were predicted.
- `pipelined`: a layer's loads begin when its gate has fired; an expert's rows are computed as soon as its load ends.
- `in-turn`: rows are sent once none of the layer's loads is in flight. Where the layer's experts do not all find a
  slot, those that do go first.

A `Strategy`'s five choices decide the rest: which experts are expected, which stay in their slots, which compute a
token, where, and in which form.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from scheduler import types as t
from scheduler.alignment import Alignment
from scheduler.core.audits import AuditTable
from scheduler.core.commands import Commands
from scheduler.core.dispatch import RowDispatcher
from scheduler.core.groups import Grouping
from scheduler.core.host_memory import HostTable
from scheduler.core.passes import PassTracker
from scheduler.core.shadow import ShadowFollower
from scheduler.core.slots import SlotTable
from scheduler.core.snapshot import CoreSnapshot, snapshot, waiting_experts
from scheduler.core.state import Demand, Request, SlotEntry, State, Worker
from scheduler.core.stats import RequestStats
from scheduler.core.tempo import Tempo
from scheduler.core.validation import validate
from scheduler.core.workers import WorkerTable
from scheduler.errors import ConfigError
from scheduler.policies.precision import FULL
from scheduler.policies.strategy import Strategy, od_moe

MAX_FAILURES = 3
"""An expert whose load or computation has failed this often fails its request."""


class Core:
    """Owns the state. The parts below change it and emit commands; this class sends each fact to the parts it concerns,
    and decides what is tried again.

    `mini_batch`: most rows that an expert computes at once in prefill; None: see `scheduler.core.dispatch`.
    `strategy`: OD-MoE's where None. `prefill`: ahead, pipelined or in-turn. Raises ConfigError.
    """

    def __init__(
        self,
        shape: t.ModelShape,
        grouping: Grouping,
        alignment: Alignment,
        mini_batch: int | None = None,
        strategy: Strategy | None = None,
        prefill: str = "ahead",
    ) -> None:
        if mini_batch is not None and mini_batch < 1:
            raise ConfigError(f"mini-batch is {mini_batch}; allowed: 1, 2, ...")
        self.shape = shape
        self.strategy = strategy = strategy or od_moe(shape)
        self._guarded = strategy.guarded
        self._state = state = State(shape)
        self._commands = commands = Commands()
        self._host = HostTable(state.host_memories, strategy.host_residency)
        self._workers = WorkerTable(state, grouping, strategy.residency, self._host)
        self._shadow = ShadowFollower(commands, alignment)
        together = prefill == "in-turn"
        residencies = strategy.residency, strategy.host_residency
        self._rows = RowDispatcher(state, commands, residencies, strategy.precision, mini_batch, together)
        self._audits = AuditTable(state, commands, self._workers, strategy.precision)
        self._slots = SlotTable(state, commands, self._workers, self._rows, self._audits, strategy)
        self._passes = PassTracker(
            state, commands, self._workers, self._slots, self._shadow, strategy, plans=prefill == "ahead"
        )
        self._tempo = Tempo()
        self.progress = 0
        """Grows with what brings an open request nearer to its end, a bounded number of times a layer: with a gate, and
        with an expert that a gate waits for and that is loaded or computed. What is done again after a loss does not
        count, until it is done."""
        self._handlers: dict[type, Callable[[Any], None]] = {
            t.WorkerJoined: self._on_worker_joined,
            t.WorkerLost: self._on_worker_lost,
            t.HoldingsChanged: self._on_holdings_changed,
            t.HostMemoryShrunk: self._on_host_memory_shrunk,
            t.ShadowJoined: self._on_shadow_joined,
            t.ShadowLost: self._on_shadow_lost,
            t.RequestOpened: self._on_request_opened,
            t.RequestClosed: self._on_request_closed,
            t.StepStarted: self._on_step_started,
            t.Predicted: self._on_predicted,
            t.Foreseen: self._on_foreseen,
            t.GateFired: self._on_gate_fired,
            t.LoadEnded: self._on_load_ended,
            t.LoadFailed: self._on_load_failed,
            t.ComputeEnded: self._on_compute_ended,
            t.ComputeFailed: self._on_compute_failed,
            t.TokenDecoded: self._on_token_decoded,
            t.WorkerWaitExpired: self._on_worker_wait_expired,
            t.RequestsStalled: self._on_requests_stalled,
            t.AuditRequested: self._audits.begin,
        }

    def handle(self, event: t.Event, now: float) -> list[t.Command]:
        """One fact in, the commands that follow from it out, in the order in which they must be carried out.

        Facts about what is already over (a load of a lost worker, a closed request) yield no commands.
        """
        state = self._state
        state.now = now
        try:
            self._handlers[type(event)](event)
            if state.waiting and (suspect := state.take_suspect()) is not None:
                self._slots.place(suspect)
            if state.touched:
                self._slots.fill()
            if state.held_back:
                self._rows.flush()
            if self._guarded and (failure := next(filter(None, (one.failure for one in self._guarded)), None)):
                self._fail_all(failure)
                self._slots.fill()
        except BaseException:  # an event that cannot be: what it began must not follow from the next one
            self._commands.take()
            state.touched.clear()
            state.held_back.clear()
            raise
        return self._commands.take()

    # --- what it knows ------------------------------------------------------------------------------------------

    @property
    def alignment(self) -> Alignment:
        return self._shadow.alignment

    @property
    def workers(self) -> list[int]:
        """Numbers of the workers and host places, ascending."""
        return sorted(self._state.workers)

    @property
    def shortfall(self) -> str | None:
        """What is missing, while open requests wait for workers: none is connected, those that are cannot hold what the
        policy keeps, or have no part of the store with an expert that a gate has chosen. None: nothing."""
        if self._state.shortfall is None and any(demand.confirmed for demand in self._state.unheld.values()):
            return "workers with parts of the model are missing"
        return self._state.shortfall

    @property
    def waiting(self) -> tuple[t.ExpertId, ...]:
        """As `CoreSnapshot.waiting`."""
        return waiting_experts(self._state)

    @property
    def awaits_experts(self) -> bool:
        """A gate has fired, and experts that it chose are still to be computed."""
        return any(visit.uncomputed for visit in self._state.visits.values())

    def demands(self, visit: t.Visit) -> Collection[Demand]:
        """Of a visit under way. They change with the next event."""
        opened = self._state.visits.get(visit)
        return opened.demands.values() if opened is not None else ()

    @property
    def stats(self) -> dict[int, RequestStats]:
        """By request. Those of closed ones stay until the caller removes them."""
        return self._state.stats

    @property
    def forms(self) -> set[str]:
        """The forms in which loads have begun so far."""
        return self._slots.forms

    @property
    def form_costs(self) -> dict[str, tuple[float, float]]:
        """Form -> seconds to load an expert and to restore it, of the median worker that knows them."""
        return self._workers.form_costs

    @property
    def exact(self) -> bool:
        """Answers so far are the model's own: the policies change none, or no smaller form was taken."""
        return not self.inexact

    @property
    def inexact(self) -> list[str]:
        """The policies that may have changed answers so far, as options."""
        strategy = self.strategy
        exact = {"router": strategy.router.exact, "precision": strategy.precision.exact}
        found = {field: "" for field, is_exact in exact.items() if not is_exact} | dict(strategy.named)
        if self.forms <= {FULL}:
            found.pop("precision", None)
        return [f"--{field} {name}".rstrip() for field, name in found.items()]

    @property
    def stalled_s(self) -> float:
        """Seconds that the requests in `stats` have waited for loads so far."""
        return sum(stats.stall_s + stats.prefill_stall_s for stats in self._state.stats.values())

    def idle(self) -> bool:
        """Nothing is under way; experts may stay in slots, or be on their way there."""
        return self.snapshot().idle

    def validate(self) -> None:
        """Check its books. Costs time: for tests and bug reports. Raises InconsistentStateError."""
        validate(self._state)

    def snapshot(self) -> CoreSnapshot:
        """What it holds now. Costs time: not for the hot path."""
        return snapshot(self._state)

    # --- workers ------------------------------------------------------------------------------------------------

    def _on_worker_joined(self, event: t.WorkerJoined) -> None:
        missing = self._state.shortfall is not None
        self._workers.on_joined(event)
        if missing and self._state.shortfall is None:
            self._passes.on_workers_back()
        self._place_unheld()

    def _place_unheld(self) -> None:
        """A worker may hold now what none did."""
        for demand in self._state.take_unheld():
            self._slots.place(demand)

    def _on_holdings_changed(self, event: t.HoldingsChanged) -> None:
        """What is queued at the worker and not there any more goes elsewhere. A load that has begun ends by itself, or
        fails."""
        worker = self._state.workers.get(event.worker)
        if worker is None:
            return
        self._workers.on_holdings_changed(event)
        holders = self._workers.holders
        misplaced = [demand for demand in worker.queue if not holders.holds(event.worker, demand.expert)]
        for demand in misplaced:
            self._slots.detach(demand)
        for demand in misplaced:
            self._slots.place(demand)
        self._place_unheld()

    def _on_worker_lost(self, event: t.WorkerLost) -> None:
        """What it was to load or compute goes to other workers. If none is left, or they cannot hold it, it waits; a
        suspect also while another is tried."""
        lost = self._workers.on_lost(event)
        if lost is None:
            return
        suspects = lost.under_way()
        counted = [demand for demand in suspects if self._shows_fault(demand, lost)]
        self._slots.on_worker_lost(lost)
        self._audits.on_worker_lost(event.worker)
        demands = sorted(lost.demands(), key=lambda demand: demand.urgency)
        for demand in demands:
            self._slots.requeue(demand)
        for demand in suspects:
            demand.lost = (*demand.lost, event.worker)
        over = [demand for demand in counted if demand.failures + 1 >= MAX_FAILURES]
        failing = {demand.visit.id.request for demand in over if demand.confirmed}
        for demand in demands:  # before any request fails: others' gates may fire with that
            if demand not in over and demand.visit.id.request not in failing:
                self._slots.place(demand)
        for demand in sorted(counted, key=lambda one: one.confirmed):
            demand.lost_at = self._state.losses
            if self._is_needed(demand):  # its request may have failed with the one before
                self._count_failure(demand, _lost_with(demand, event.reason))

    def _on_host_memory_shrunk(self, event: t.HostMemoryShrunk) -> None:
        self._host.on_shrunk(event.worker, event.host_slots)

    def _shows_fault(self, demand: Demand, lost: Worker) -> bool:
        """The worker was alive when it got this demand, and so may have died of it. Workers that all die at once are
        noticed one after the other, and the first one's demands are sent to the others meanwhile."""
        again = lost.joined_at >= demand.lost_at
        loaded_here = demand.entry is not None and demand.entry.loaded and not demand.hit
        return not demand.lost or again or loaded_here

    def _is_needed(self, demand: Demand) -> bool:
        visit = demand.visit
        return self._state.visits.get(visit.id) is visit and visit.demands.get(demand.key) is demand

    def _on_worker_wait_expired(self, event: t.WorkerWaitExpired) -> None:
        if self._state.shortfall is not None:
            self._fail_all(event.reason)
            return
        unheld = sorted(self._state.unheld.values(), key=lambda demand: demand.urgency)
        for demand in unheld:
            if demand.confirmed and demand.state != "over":
                story = self._workers.holders.story(demand.expert)
                self._fail(demand.visit.id.request, f"{story}; {event.reason}")

    def _on_requests_stalled(self, event: t.RequestsStalled) -> None:
        stalled = {key.request: None for key, visit in self._state.visits.items() if visit.uncomputed}
        for request in stalled:
            self._fail(request, event.reason)

    # --- requests and the shadow --------------------------------------------------------------------------------

    def _on_request_opened(self, event: t.RequestOpened) -> None:
        stats = self._state.stats[event.request] = RequestStats(event.prompt_tokens)
        self._state.requests[event.request] = Request(stats)
        self._shadow.on_request_opened(event.request, event.prompt_tokens)
        self._workers.settle()

    def _on_request_closed(self, event: t.RequestClosed) -> None:
        if event.request in self._state.requests:
            self._close(event.request)

    def _close(self, request: int) -> None:
        del self._state.requests[request]
        self._passes.close(request)
        self.strategy.predictor.on_request_closed(request)
        self._shadow.on_request_closed(request)

    def _fail_all(self, reason: str) -> None:
        self._passes.end_step()
        for request in list(self._state.requests):
            self._fail(request, reason)

    def _fail(self, request: int, reason: str) -> None:
        self._close(request)
        self._commands.fail(request, reason)

    def _on_shadow_joined(self, event: t.ShadowJoined) -> None:
        """Predictions of what came before are not waited for."""
        for request in self._state.requests.values():
            request.stats.orphan()
        self._shadow.on_joined()

    def _on_shadow_lost(self, event: t.ShadowLost) -> None:
        self._shadow.on_lost()
        if not self.strategy.predicts:
            for request in self._state.requests.values():
                request.stats.orphan()

    # --- passes, predictions and gates --------------------------------------------------------------------------

    def _on_token_decoded(self, event: t.TokenDecoded) -> None:
        request = self._state.requests.get(event.request)
        if request is None:
            return
        again = request.prefilling and event.index > 0
        if again:
            self._passes.read_again(request, event.index)
        if request.prefilling:
            request.prefilling = False
            self._passes.warm_up(event.request, request)
        elif request.in_block:
            self._passes.cut_back(request, event.index)
        self._shadow.on_token_decoded(event.request, event.index, event.drafts, again)

    def _on_step_started(self, event: t.StepStarted) -> None:
        load_s, layer_s = self._workers.costs.load_s, self._tempo.layer_s
        if load_s and layer_s:
            self.strategy.predictor.on_paced(load_s, layer_s)
        self._tempo.begin()
        self._passes.begin(event.passes)

    def _on_predicted(self, event: t.Predicted) -> None:
        request = self._state.requests.get(event.request)
        if request is not None:
            self._passes.prefetch(request, t.Visit(event.request, event.position, event.layer), event.experts)

    def _on_foreseen(self, event: t.Foreseen) -> None:
        request = self._state.requests.get(event.request)
        if request is not None:
            self._passes.on_foreseen(request, event)

    def _on_gate_fired(self, event: t.GateFired) -> None:
        request = self._state.requests.get(event.visit.request)
        if request is None:
            return
        self.progress += 1
        if not request.prefilling:
            self._tempo.gate(self._state.now, request.stats.stall_s)
        self._passes.on_gate_fired(event)

    # --- loads and computations ---------------------------------------------------------------------------------

    def _on_load_ended(self, event: t.LoadEnded) -> None:
        entry = self._state.loads.get(event.load_id)
        if entry is None:
            self._audits.on_load_ended(event.load_id)
            return
        entry.stats.bytes_loaded += event.nbytes
        self.progress += any(user.confirmed and not user.lost for user in entry.users)
        self._slots.on_loaded(entry)

    def _on_compute_ended(self, event: t.ComputeEnded) -> None:
        asked = self._state.calls.get(event.call_id)
        self.progress += asked is not None and not (asked.lost and asked.calls[1:])
        demand = self._rows.on_answered(event.call_id)
        if demand is None:
            self._audits.on_computed(event.call_id)
            return
        if demand.entry is not None and not demand.entry.loaded:
            self._slots.on_loaded(demand.entry)  # LoadEnded was lost, or is still on its way
        self._passes.on_computed(demand)

    def _on_load_failed(self, event: t.LoadFailed) -> None:
        entry = self._state.loads.get(event.load_id)
        if entry is None:
            self._audits.on_load_failed(event.load_id)
            return
        self._retry_failed(entry, list(entry.users), event.reason)

    def _on_compute_failed(self, event: t.ComputeFailed) -> None:
        demand = self._state.calls.get(event.call_id)
        if demand is None:
            self._audits.on_compute_failed(event.call_id)
            return
        if demand.entry is not None:
            self._retry_failed(demand.entry, [demand], event.reason)
        elif not self._count_failure(demand, event.reason):
            host = demand.worker
            self._slots.requeue(demand)
            self._slots.place(demand, avoid=host)

    def _retry_failed(self, entry: SlotEntry, failed: list[Demand], reason: str) -> None:
        """Elsewhere, and not for ever. All that shared the slot begin again."""
        self._slots.invalidate(entry)
        for demand in failed:
            if demand in entry.users:  # its request may have failed with the one before
                self._count_failure(demand, reason)
        if entry.users:
            again = list(entry.users)
            self._slots.evict(entry)
            for demand in again:
                self._slots.requeue(demand)
            for demand in again:
                self._slots.place(demand, avoid=entry.worker)

    def _count_failure(self, demand: Demand, reason: str) -> bool:
        """Whether it has failed too often. Then its request fails; a prefetch is only cancelled, and its expert is
        tried again if the gate chooses it."""
        demand.failures += 1
        if demand.failures < MAX_FAILURES:
            return False
        visit, (layer, expert) = demand.visit, demand.expert
        if demand.confirmed:
            reason = f"expert {expert} of layer {layer} failed {demand.failures} times: {reason}"
            self._fail(visit.id.request, reason)
        else:
            visit.unloadable += (expert,)
            self._slots.cancel(visit.demands.pop(demand.key))
        return True


def _lost_with(demand: Demand, reason: str) -> str:
    names = [f"worker {number}" for number in dict.fromkeys(demand.lost)]
    return (
        f"{', '.join(names)} {'were' if names[1:] else 'was'} lost while loading or computing it, the last with: "
        f"{reason}; look into the workers' logs"
    )
