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
from scheduler.core.dispatch import Calls
from scheduler.core.groups import Placement
from scheduler.core.passes import Visits
from scheduler.core.shadow import Following
from scheduler.core.slots import Stock
from scheduler.core.state import Held, Need, Request
from scheduler.core.stats import RequestLedger
from scheduler.core.tempo import Tempo
from scheduler.errors import ConfigError
from scheduler.policies.strategy import Strategy, od_moe

MAX_FAILURES = 3
"""An expert whose load or computation failed this often fails its request."""


class Core:
    """See the module. `mini_batch`: most rows an expert computes at once in prefill; see `scheduler.core.dispatch` for
    None. `prefill`: ahead, pipelined or in-turn."""

    def __init__(
        self, shape: t.ModelShape, placement: Placement, alignment: Alignment, mini_batch: int | None = None,
        strategy: Strategy | None = None, prefill: str = "ahead",
    ) -> None:  # fmt: skip
        if mini_batch is not None and mini_batch < 1:
            raise ConfigError(f"mini-batch is {mini_batch}; allowed: 1, 2, ...")
        self.shape = shape
        self.mini_batch = mini_batch
        self.ledgers: dict[int, RequestLedger] = {}
        self.strategy = strategy = strategy or od_moe(shape)
        self._in_turn = prefill == "in-turn"
        self._following = Following(alignment)
        ids = itertools.count(1)
        self._out: list[t.Command] = []
        self._sending = Calls(self._out, ids, mini_batch, strategy.residency, not self._in_turn)
        self._stock = Stock(
            shape, placement, strategy.residency, strategy.precision, ids, self._out, self._sending.ready, self._found
        )
        plans = prefill == "ahead"
        self._visits = Visits(shape, placement, strategy, self._stock, self._sending, ids, self._out, plans)
        self._tempo = Tempo()
        self._workers = self._stock.workers
        self._loads = self._stock.loads
        self._calls = self._sending.owed
        self._held_back = self._sending.held_back
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
        return self._following.alignment

    @property
    def workers(self) -> list[int]:
        """The live workers, ascending."""
        return sorted(self._stock.workers)

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
            self._sending.send_together()
        return out.copy() if out else []

    # --- workers ------------------------------------------------------------------------------------------------

    def _worker_joined(self, event: t.WorkerJoined) -> None:
        if event.slots < 0:
            raise ConfigError(f"worker {event.worker} has {event.slots} slots; allowed: 0 (a host place), 1, 2, ...")
        self._stock.joined(event)

    def _worker_lost(self, event: t.WorkerLost) -> None:
        lost = self._stock.lost(event.worker)
        if lost is None:
            return
        needs = sorted(lost.needs(), key=lambda n: n.rank)
        for need in needs:
            self._set_back(need)
        lacks = self._stock.lacks() if self._stock.live else f"the last worker is gone: {event.reason}"
        if lacks is not None:
            for request in list(self._requests):
                self._fail(request, lacks)
            return
        for need in needs:
            self._stock.want(need)
        self._stock.fill()

    def _set_back(self, need: Need) -> None:
        """It begins again, from its load; what the worker still says of it is not heard."""
        opened = need.opened
        if need.confirmed:
            opened.waiting += need.held is not None and need.held.loaded
            self._sending.changed(opened)
        self._sending.forget(need)
        self._stock.detach(need)

    # --- requests and the shadow --------------------------------------------------------------------------------

    def _request_opened(self, event: t.RequestOpened) -> None:
        self.ledgers[event.request] = RequestLedger(event.prompt_tokens)
        self._requests[event.request] = Request(self.ledgers[event.request])
        self._out += self._following.opened(event.request, event.prompt_tokens)
        lacks = self._stock.lacks() if self._stock.live else "no worker is connected"
        if lacks is not None:
            self._fail(event.request, lacks)

    def _request_closed(self, event: t.RequestClosed) -> None:
        if event.request in self._requests:
            self._close(event.request)
            self._stock.fill()

    def _close(self, request: int) -> None:
        del self._requests[request]
        opened = self._visits.open
        for visit in [v for v in opened if v.request == request]:
            for need in opened.pop(visit).needs.values():
                self._visits.drop(need)
        self.strategy.predictor.closed(request)
        self._out += self._following.closed(request)

    def _fail(self, request: int, reason: str) -> None:
        self._close(request)
        self._out.append(t.Fail(request, reason))

    def _shadow_joined(self, event: t.ShadowJoined) -> None:
        self._out += self._following.joined()
        self._visits.followed = True

    def _shadow_lost(self, event: t.ShadowLost) -> None:
        self._following.lost()
        self._visits.followed = False
        if not self.strategy.predicts:
            for request in self._requests.values():
                request.ledger.orphan()

    # --- passes, predictions and gates --------------------------------------------------------------------------

    def _token_decoded(self, event: t.TokenDecoded) -> None:
        request = self._requests.get(event.request)
        if request is None:
            return
        if request.prefilling:
            request.prefilling = False
            self._visits.warm(event.request, request)
            self._stock.fill()
        self._out += self._following.decoded(event.request, event.index)

    def _pass_started(self, event: t.PassStarted) -> None:
        request = self._requests.get(event.request)
        if request is None:
            return
        costs, layer_s = self._stock.costs, self._tempo.layer_s
        if costs.load_s and layer_s:
            self.strategy.predictor.paced(costs.load_s, layer_s)
        self._tempo.begin()
        self._visits.begin(request, event)
        self._stock.fill()

    def _predicted(self, event: t.Predicted) -> None:
        request = self._requests.get(event.request)
        if request is not None:
            self._visits.predict(request, t.Visit(event.request, event.position, event.layer), event.experts)
            self._stock.fill()

    def _foreseen(self, event: t.Foreseen) -> None:
        request = self._requests.get(event.request)
        if request is not None:
            self._visits.foreseen(request, event)
            self._stock.fill()

    def _gate_fired(self, event: t.GateFired) -> None:
        request = self._requests.get(event.visit.request)
        if request is not None:
            if not request.prefilling:
                self._tempo.gate(self._now, request.ledger.stall_s)
            self._visits.fired(request, event, self._now)
            self._stock.fill()

    # --- loads and computations ---------------------------------------------------------------------------------

    def _load_ended(self, event: t.LoadEnded) -> None:
        held = self._loads.get(event.load_id)
        if held is not None:
            held.ledger.bytes_loaded += event.nbytes
            self._loaded(held)
            self._stock.fill()

    def _loaded(self, held: Held) -> None:
        self._stock.loaded(held)
        for need in list(held.users):
            if need.opened.errand:
                del need.opened.needs[need.seq]
                self._visits.drop(need)
            elif need.confirmed:
                self._found(need)
                if self._in_turn:
                    self._sending.changed(need.opened)

    def _found(self, need: Need) -> None:
        """Its gate was waiting for its load."""
        opened = need.opened
        opened.waiting -= 1
        if opened.waiting == 0:
            request = opened.request
            request.ledger.stalled(self._now - opened.since, request.prefilling)
            opened.since = self._now

    def _compute_ended(self, event: t.ComputeEnded) -> None:
        need = self._sending.answered(event.call_id)
        if need is None or need.held is None:
            return
        opened, held = need.opened, need.held
        if not held.loaded:
            self._loaded(held)  # the word of its load was lost or is still on its way
        self._stock.computed(held, need)
        if need.hit:
            opened.request.ledger.hit(opened.request.prefilling)
        elif held.hosted:
            opened.request.ledger.hosted(opened.request.prefilling)
        del opened.needs[need.expert.expert]
        opened.left -= 1
        if opened.left == 0:
            self._visits.finish(opened)
        self._stock.fill()

    def _load_failed(self, event: t.LoadFailed) -> None:
        held = self._loads.get(event.load_id)
        if held is not None:
            self._retry(held, list(held.users), event.reason)

    def _compute_failed(self, event: t.ComputeFailed) -> None:
        need = self._calls.get(event.call_id)
        if need is not None and need.held is not None:
            self._retry(need.held, [need], event.reason)

    def _retry(self, held: Held, failed: list[Need], reason: str) -> None:
        """Elsewhere, not for ever. What was only predicted is then let go: if the gate names it, it is tried again."""
        self._stock.spoil(held)
        for need in failed:
            need.failures += 1
            if need.failures >= MAX_FAILURES and need in held.users:
                self._give_up(need, reason)
        if held.users:
            again = list(held.users)
            self._stock.evict(held)
            for need in again:
                self._set_back(need)
            for need in again:
                self._stock.want(need, shun=held.worker)
        self._stock.fill()

    def _give_up(self, need: Need, reason: str) -> None:
        opened, (layer, expert) = need.opened, need.expert
        if need.confirmed:
            failed = f"expert {expert} of layer {layer} failed {need.failures} times: {reason}"
            self._fail(opened.visit.request, failed)
        else:
            opened.let_go += (expert,)
            self._visits.drop(opened.needs.pop(need.seq if opened.errand else expert))
