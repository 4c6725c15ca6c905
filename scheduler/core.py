"""The scheduler: a state machine that turns facts into commands.

`handle(event, now) -> commands`. It never sleeps, reads a clock or sees a tensor: the runtime executes its commands and
feeds facts back, a simulator pops a heap and does the same. Same events, same times: same commands.

Decode (OD-MoE section 3.1): a prediction assigns a layer's experts to the workers of its group; each worker loads what
it is assigned, in order, as its slots come free. When the gate fires, predictions it does not name are dropped, experts
that no prediction named are loaded then, and every named expert is computed once and evicted.
Prefill (section 3.3): every layer's experts are assigned to all workers before its gate, as if all were predicted.

Three choices change that. A predictor says in the shadow's place what decoding will need. A residency says which
experts stay in their slots; whoever needs one that is there computes it there, without a load. In-turn prefill (not
`prefill_ahead`) begins a layer's loads when its gate has fired, and sends rows when none of its loads is under way any
more: where its experts do not all find a slot, those that do go first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from scheduler import types as t
from scheduler.alignment import Alignment
from scheduler.calls import Calls
from scheduler.errors import ConfigError
from scheduler.fleet import Held, Need, OpenVisit, Request
from scheduler.follow import Following
from scheduler.ledger import RequestLedger
from scheduler.placement import Placement
from scheduler.predictors import Predictor
from scheduler.residency import CACHELESS, Residency
from scheduler.stock import Stock

MAX_FAILURES = 3
"""An expert whose load or computation failed this often fails its request."""


class Core:
    """See the module. `mini_batch`: most rows an expert computes at once in prefill; see `scheduler.calls` for None."""

    def __init__(
        self, shape: t.ModelShape, placement: Placement, alignment: Alignment, mini_batch: int | None = None, *,
        predictor: Predictor | None = None, residency: Residency = CACHELESS, prefill_ahead: bool = True,
    ) -> None:  # fmt: skip
        if mini_batch is not None and mini_batch < 1:
            raise ConfigError(f"mini-batch is {mini_batch}; allowed: 1, 2, ...")
        self.shape = shape
        self.mini_batch = mini_batch
        self.ledgers: dict[int, RequestLedger] = {}
        self._placement = placement
        self._predictor = predictor
        self._ahead = prefill_ahead
        self._following = Following(alignment)
        self._ordinal = {layer: i for i, layer in enumerate(shape.layers)}
        self._ids = itertools.count(1)
        self._out: list[t.Command] = []
        self._sending = Calls(self._out, self._ids, mini_batch, residency, prefill_ahead)
        self._stock = Stock(shape, placement, residency, self._ids, self._out, self._sending.ready)
        self._workers = self._stock.workers
        self._loads = self._stock.loads
        self._calls = self._sending.owed
        self._held_back = self._sending.held_back
        self._requests: dict[int, Request] = {}
        self._visits: dict[t.Visit, OpenVisit] = {}
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
        return list(self._stock.live)

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
        if event.slots < 1:
            raise ConfigError(f"worker {event.worker} has {event.slots} slots; allowed: 1, 2, ...")
        self._stock.joined(event.worker, event.slots)

    def _worker_lost(self, event: t.WorkerLost) -> None:
        lost = self._stock.lost(event.worker)
        if lost is None:
            return
        needs = sorted(lost.needs(), key=lambda n: n.rank)
        for need in needs:
            self._set_back(need)
        lacks = self._stock.lacks() if self._workers else f"the last worker is gone: {event.reason}"
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
        lacks = self._stock.lacks() if self._workers else "no worker is connected"
        if lacks is not None:
            self._fail(event.request, lacks)

    def _request_closed(self, event: t.RequestClosed) -> None:
        request = self._requests.pop(event.request, None)
        if request is None:
            return
        for visit in [v for v in self._visits if v.request == event.request]:
            for need in self._visits.pop(visit).needs.values():
                self._drop(need)
        self._out += self._following.closed(event.request)
        self._stock.fill()

    def _fail(self, request: int, reason: str) -> None:
        self._request_closed(t.RequestClosed(request))
        self._out.append(t.Fail(request, reason))

    def _shadow_joined(self, event: t.ShadowJoined) -> None:
        self._out += self._following.joined()

    def _shadow_lost(self, event: t.ShadowLost) -> None:
        self._following.lost()
        if self._predictor is None:
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
        if not event.prefill:
            self._take_predictions(event.request, event.position)
        elif self._ahead:
            self._plan_prefill(request, event.request, event.position, 0)
            self._stock.fill()

    def _take_predictions(self, number: int, position: int) -> None:
        if self._predictor is None:
            return
        for ordinal, layer in enumerate(self.shape.layers):
            visit = t.Visit(number, position, layer)
            experts = self._predictor.predict(visit, self.shape.count(ordinal), self.shape.top_k)
            self._predicted(t.Predicted(number, position, layer, experts))

    def _horizon(self) -> int:
        """How many layers ahead prefill assigns: enough to fill every slot while one layer computes."""
        return 1 + -(-self._stock.total // self.shape.experts)

    def _plan_prefill(self, request: Request, number: int, position: int, start: int) -> None:
        """Assign layers from ordinal `start` to the horizon, those that are not assigned yet."""
        stop = min(start + self._horizon(), len(self.shape.layers))
        for ordinal in range(request.planned, stop):
            opened = self._open(request, t.Visit(number, position, self.shape.layers[ordinal]), ordinal)
            for expert, worker in enumerate(self._share(ordinal)):
                self._stock.want(self._need(opened, expert), worker)
        request.planned = max(request.planned, stop)

    def _share(self, ordinal: int) -> list[int]:
        return self._placement.share(self._stock.live, ordinal, self.shape.count(ordinal))

    def _open(self, request: Request, visit: t.Visit, ordinal: int) -> OpenVisit:
        turn = visit.position * len(self.shape.layers) + ordinal
        opened = self._visits[visit] = OpenVisit(visit, request, turn)
        return opened

    def _predicted(self, event: t.Predicted) -> None:
        request = self._requests.get(event.request)
        if request is None:
            return
        visit = t.Visit(event.request, event.position, event.layer)
        request.ledger.predicted(visit, event.experts)
        ordinal = self._ordinal[event.layer]
        if (event.position, ordinal) <= request.reached:
            request.ledger.late += 1
            return
        opened = self._visits.get(visit) or self._open(request, visit, ordinal)
        needs, experts, stock = opened.needs, event.experts, self._stock
        for expert in [e for e in needs if e not in experts] if needs else ():
            self._drop(needs.pop(expert))
        group = self._placement.group(stock.live, opened.turn)
        for expert, worker in zip(experts, itertools.cycle(group), strict=False):
            if expert not in needs:
                stock.want(self._need(opened, expert), worker)
        stock.fill()

    def _need(self, opened: OpenVisit, expert: int) -> Need:
        need = opened.needs[expert] = Need(next(self._ids), opened, t.ExpertId(opened.visit.layer, expert))
        return need

    # --- the gate -----------------------------------------------------------------------------------------------

    def _gate_fired(self, event: t.GateFired) -> None:
        visit = event.visit
        request = self._requests.get(visit.request)
        if request is None:
            return
        ordinal = self._ordinal[visit.layer]
        opened = self._visits.get(visit) or self._open(request, visit, ordinal)
        opened.since = self._now
        request.reached = (visit.position, ordinal)
        named = dict(event.rows)
        self._compare(opened, named)
        self._name(opened, named, ordinal)
        opened.left = len(named)
        if request.prefilling and self._ahead:
            self._plan_prefill(request, visit.request, visit.position, ordinal + 1)
        if not named:
            self._finish(opened)
        self._stock.fill()

    def _compare(self, opened: OpenVisit, named: dict[int, int]) -> None:
        """Prediction and truth: what is wrong is dropped. `named`: expert -> rows."""
        request, needs = opened.request, opened.needs
        wrong = [] if needs.keys() == named.keys() else [e for e in needs if e not in named]
        if not request.prefilling and (self._following.present or self._predictor is not None):
            request.ledger.activated(opened.visit, named.keys())
            request.ledger.in_time += len(needs) - len(wrong)
        for expert in wrong:
            need = needs.pop(expert)
            request.ledger.unused += need.held is not None and not need.hit
            self._drop(need)

    def _name(self, opened: OpenVisit, named: dict[int, int], ordinal: int) -> None:
        """Every expert that the gate names is to be computed, those that were predicted first."""
        needs, waiting, confirm = opened.needs, 0, self._stock.confirm
        missed = [] if len(needs) == len(named) else [e for e in named if e not in needs]
        for expert, rows in named.items():
            need = needs.get(expert)
            if need is not None:
                need.rows = rows
                confirm(need)
                waiting += need.held is None or not need.held.loaded
        share = self._share(ordinal) if missed and opened.request.prefilling and not self._ahead else None
        for expert in missed:
            need = self._need(opened, expert)
            need.confirmed, need.rows = True, named[expert]
            need.late = share is None and expert not in opened.let_go
            self._stock.want(need, share[expert] if share is not None else None)
            waiting += need.held is None or not need.held.loaded
        opened.waiting = waiting

    # --- loads and computations ---------------------------------------------------------------------------------

    def _load_ended(self, event: t.LoadEnded) -> None:
        held = self._loads.get(event.load_id)
        if held is not None:
            held.ledger.bytes_loaded += event.nbytes
            self._loaded(held)

    def _loaded(self, held: Held) -> None:
        held.loaded = True
        del self._loads[held.load_id]
        for need in held.users:
            if need.confirmed:  # its gate was waiting for it
                opened = need.opened
                opened.waiting -= 1
                if opened.waiting == 0:
                    request = opened.request
                    request.ledger.stalled(self._now - opened.since, request.prefilling)
                    opened.since = self._now
                if not self._ahead:
                    self._sending.changed(opened)

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
        del opened.needs[need.expert.expert]
        opened.left -= 1
        if opened.left == 0:
            self._finish(opened)
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
            self._drop(opened.needs.pop(expert))

    def _finish(self, opened: OpenVisit) -> None:
        del self._visits[opened.visit]
        self._out.append(t.Resume(opened.visit))

    def _drop(self, need: Need) -> None:
        self._sending.forget(need)
        self._stock.drop(need)
