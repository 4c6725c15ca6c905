"""The scheduler: a state machine that turns facts into commands.

`handle(event, now) -> commands`. It never sleeps, reads a clock or sees a tensor: the runtime executes its commands and
feeds facts back, a simulator pops a heap and does the same. Same events, same times: same commands.

Decode (OD-MoE section 3.1): a prediction assigns a layer's experts to the workers of its group; each worker loads what
it is assigned, in order, as its slots come free. When the gate fires, predictions it does not name are dropped, experts
that no prediction named are loaded then, and every named expert is computed once and evicted.
Prefill (section 3.3): every layer's experts are assigned to all workers before its gate, as if all were predicted.

A `Strategy`'s five choices change that, and how prefill goes: `ahead`, as said; `pipelined`, a layer's loads begin when
its gate has fired, and rows are computed as each load ends; `in-turn`, rows are sent when none of the layer's loads is
under way any more: where its experts do not all find a slot, those that do go first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from scheduler import types as t
from scheduler.alignment import Alignment
from scheduler.core.dispatch import RowDispatcher
from scheduler.core.groups import Grouping
from scheduler.core.passes import PassTracker
from scheduler.core.shadow import ShadowFollower
from scheduler.core.slots import SlotTable
from scheduler.core.snapshot import CoreSnapshot, worker_snapshot
from scheduler.core.state import Demand, Request, Residence
from scheduler.core.stats import RequestStats
from scheduler.core.tempo import Tempo
from scheduler.errors import ConfigError
from scheduler.policies.strategy import Strategy, od_moe

MAX_FAILURES = 3
"""An expert whose load or computation failed this often fails its request."""


class Core:
    """See the module. `mini_batch`: most rows an expert computes at once in prefill; see `scheduler.core.dispatch` for
    None. `prefill`: ahead, pipelined or in-turn."""

    def __init__(
        self, shape: t.ModelShape, grouping: Grouping, alignment: Alignment, mini_batch: int | None = None,
        strategy: Strategy | None = None, prefill: str = "ahead",
    ) -> None:  # fmt: skip
        if mini_batch is not None and mini_batch < 1:
            raise ConfigError(f"mini-batch is {mini_batch}; allowed: 1, 2, ...")
        self.shape = shape
        self.mini_batch = mini_batch
        self.stats: dict[int, RequestStats] = {}
        self.strategy = strategy = strategy or od_moe(shape)
        self._in_turn = prefill == "in-turn"
        self._follower = ShadowFollower(alignment)
        ids = itertools.count(1)
        self._out: list[t.Command] = []
        self._dispatch = RowDispatcher(self._out, ids, mini_batch, strategy.residency, not self._in_turn)
        self._slots = SlotTable(
            shape,
            grouping,
            strategy.residency,
            strategy.precision,
            ids,
            self._out,
            self._dispatch.ready,
            self._load_over,
        )
        plans = prefill == "ahead"
        self._passes = PassTracker(shape, grouping, strategy, self._slots, self._dispatch, ids, self._out, plans)
        self._tempo = Tempo()
        self._loads = self._slots.loads
        self._calls = self._dispatch.owed
        self._held_back = self._dispatch.held_back
        self._requests: dict[int, Request] = {}
        self._now = 0.0
        self._handlers: dict[type, Callable[..., None]] = {
            t.WorkerJoined: self._worker_joined,
            t.WorkerLost: self._worker_lost,
            t.ShadowJoined: self._shadow_joined,
            t.ShadowLost: self._shadow_lost,
            t.RequestOpened: self._request_opened,
            t.RequestClosed: self._request_closed,
            t.PassStarted: self._pass_started,
            t.Predicted: self._predicted,
            t.Foreseen: self._foreseen,
            t.GateFired: self._gate_fired,
            t.LoadEnded: self._load_ended,
            t.LoadFailed: self._load_failed,
            t.ComputeEnded: self._compute_ended,
            t.ComputeFailed: self._compute_failed,
            t.TokenDecoded: self._token_decoded,
        }

    @property
    def alignment(self) -> Alignment:
        return self._follower.alignment

    @property
    def workers(self) -> list[int]:
        """The live workers, ascending."""
        return sorted(self._slots.workers)

    @property
    def stalled_s(self) -> float:
        """Seconds that open requests have waited for loads so far."""
        return sum(one.stall_s + one.prefill_stall_s for one in self.stats.values())

    def idle(self) -> bool:
        """Nobody waits for anything; experts may stay in slots, or be on their way there."""
        return self.snapshot().idle

    def snapshot(self) -> CoreSnapshot:
        """What it holds now. Costs time: not for the hot path."""
        return CoreSnapshot(
            requests=tuple(self._requests),
            visits=tuple(self._passes.open),
            calls=tuple(self._calls),
            loads=tuple(self._loads),
            held_back=tuple(self._held_back),
            workers={number: worker_snapshot(worker) for number, worker in self._slots.workers.items()},
        )

    def handle(self, event: t.Event, now: float) -> list[t.Command]:
        """One fact in, the commands that follow from it out, in the order in which they must be carried out.

        Facts about what is already over (a load of a lost worker, a request that was closed) yield no commands.
        """
        self._now = now
        out = self._out
        if out:
            out.clear()
        self._handlers[type(event)](event)
        if self._held_back:
            self._dispatch.send_together()
        return out.copy() if out else []

    # --- workers ------------------------------------------------------------------------------------------------

    def _worker_joined(self, event: t.WorkerJoined) -> None:
        if event.slots < 0:
            raise ConfigError(f"worker {event.worker} has {event.slots} slots; allowed: 0 (a host place), 1, 2, ...")
        self._slots.worker_joined(event)

    def _worker_lost(self, event: t.WorkerLost) -> None:
        lost = self._slots.worker_lost(event.worker)
        if lost is None:
            return
        demands = sorted(lost.demands(), key=lambda n: n.urgency)
        for demand in demands:
            self._set_back(demand)
        shortfall = self._slots.shortfall() if self._slots.live else f"the last worker is gone: {event.reason}"
        if shortfall is not None:
            for request in list(self._requests):
                self._fail(request, shortfall)
            return
        for demand in demands:
            self._slots.place(demand)
        self._slots.fill()

    def _set_back(self, demand: Demand) -> None:
        """It begins again, from its load; what the worker still says of it is not heard."""
        opened = demand.opened
        if demand.confirmed:
            opened.waiting += demand.held is not None and demand.held.loaded
            self._dispatch.changed(opened)
        self._dispatch.forget(demand)
        self._slots.detach(demand)

    # --- requests and the shadow --------------------------------------------------------------------------------

    def _request_opened(self, event: t.RequestOpened) -> None:
        self.stats[event.request] = RequestStats(event.prompt_tokens)
        self._requests[event.request] = Request(self.stats[event.request])
        self._out += self._follower.opened(event.request, event.prompt_tokens)
        shortfall = self._slots.shortfall() if self._slots.live else "no worker is connected"
        if shortfall is not None:
            self._fail(event.request, shortfall)

    def _request_closed(self, event: t.RequestClosed) -> None:
        if event.request in self._requests:
            self._close(event.request)
            self._slots.fill()

    def _close(self, request: int) -> None:
        del self._requests[request]
        opened = self._passes.open
        for visit in [v for v in opened if v.request == request]:
            for demand in opened.pop(visit).demands.values():
                self._passes.cancel(demand)
        self.strategy.predictor.closed(request)
        self._out += self._follower.closed(request)

    def _fail(self, request: int, reason: str) -> None:
        self._close(request)
        self._out.append(t.Fail(request, reason))

    def _shadow_joined(self, event: t.ShadowJoined) -> None:
        self._out += self._follower.joined()
        self._passes.followed = True

    def _shadow_lost(self, event: t.ShadowLost) -> None:
        self._follower.lost()
        self._passes.followed = False
        if not self.strategy.predicts:
            for request in self._requests.values():
                request.stats.orphan()

    # --- passes, predictions and gates --------------------------------------------------------------------------

    def _token_decoded(self, event: t.TokenDecoded) -> None:
        request = self._requests.get(event.request)
        if request is None:
            return
        if request.prefilling:
            request.prefilling = False
            self._passes.begin_warm_up(event.request, request)
            self._slots.fill()
        self._out += self._follower.decoded(event.request, event.index)

    def _pass_started(self, event: t.PassStarted) -> None:
        request = self._requests.get(event.request)
        if request is None:
            return
        costs, layer_s = self._slots.costs, self._tempo.layer_s
        if costs.load_s and layer_s:
            self.strategy.predictor.paced(costs.load_s, layer_s)
        self._tempo.begin()
        self._passes.begin(request, event)
        self._slots.fill()

    def _predicted(self, event: t.Predicted) -> None:
        request = self._requests.get(event.request)
        if request is not None:
            self._passes.receive_prediction(request, t.Visit(event.request, event.position, event.layer), event.experts)
            self._slots.fill()

    def _foreseen(self, event: t.Foreseen) -> None:
        request = self._requests.get(event.request)
        if request is not None:
            self._passes.foreseen(request, event)
            self._slots.fill()

    def _gate_fired(self, event: t.GateFired) -> None:
        request = self._requests.get(event.visit.request)
        if request is not None:
            if not request.prefilling:
                self._tempo.gate(self._now, request.stats.stall_s)
            self._passes.gate_fired(request, event, self._now)
            self._slots.fill()

    # --- loads and computations ---------------------------------------------------------------------------------

    def _load_ended(self, event: t.LoadEnded) -> None:
        held = self._loads.get(event.load_id)
        if held is not None:
            held.stats.bytes_loaded += event.nbytes
            self._loaded(held)
            self._slots.fill()

    def _loaded(self, held: Residence) -> None:
        self._slots.loaded(held)
        for demand in list(held.users):
            if demand.opened.warm_up:
                del demand.opened.demands[demand.seq]
                self._passes.cancel(demand)
            elif demand.confirmed:
                self._load_over(demand)
                if self._in_turn:
                    self._dispatch.changed(demand.opened)

    def _load_over(self, demand: Demand) -> None:
        """Its gate was waiting for its load."""
        opened = demand.opened
        opened.waiting -= 1
        if opened.waiting == 0:
            request = opened.request
            request.stats.stalled(self._now - opened.since, request.prefilling)
            opened.since = self._now

    def _compute_ended(self, event: t.ComputeEnded) -> None:
        demand = self._dispatch.answered(event.call_id)
        if demand is None or demand.held is None:
            return
        opened, held = demand.opened, demand.held
        if not held.loaded:
            self._loaded(held)  # the word of its load was lost or is still on its way
        self._slots.computed(held, demand)
        if demand.hit:
            opened.request.stats.hit(opened.request.prefilling)
        elif held.hosted:
            opened.request.stats.hosted(opened.request.prefilling)
        del opened.demands[demand.expert.expert]
        opened.left -= 1
        if opened.left == 0:
            self._passes.finish(opened)
        self._slots.fill()

    def _load_failed(self, event: t.LoadFailed) -> None:
        held = self._loads.get(event.load_id)
        if held is not None:
            self._retry(held, list(held.users), event.reason)

    def _compute_failed(self, event: t.ComputeFailed) -> None:
        demand = self._calls.get(event.call_id)
        if demand is not None and demand.held is not None:
            self._retry(demand.held, [demand], event.reason)

    def _retry(self, held: Residence, failed: list[Demand], reason: str) -> None:
        """Elsewhere, not for ever. What was only predicted is then let go: if the gate names it, it is tried again."""
        self._slots.invalidate(held)
        for demand in failed:
            demand.failures += 1
            if demand.failures >= MAX_FAILURES and demand in held.users:
                self._give_up(demand, reason)
        if held.users:
            again = list(held.users)
            self._slots.evict(held)
            for demand in again:
                self._set_back(demand)
            for demand in again:
                self._slots.place(demand, shun=held.worker)
        self._slots.fill()

    def _give_up(self, demand: Demand, reason: str) -> None:
        opened, (layer, expert) = demand.opened, demand.expert
        if demand.confirmed:
            failed = f"expert {expert} of layer {layer} failed {demand.failures} times: {reason}"
            self._fail(opened.visit.request, failed)
        else:
            opened.given_up += (expert,)
            self._passes.cancel(opened.demands.pop(demand.seq if opened.warm_up else expert))
