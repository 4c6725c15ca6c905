"""From a pass's beginning to its gates: what is brought into slots before a gate has fired, and what once it has."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from scheduler import types as t
from scheduler.core.dispatch import Calls
from scheduler.core.groups import Placement
from scheduler.core.slots import Stock
from scheduler.core.state import Need, OpenVisit, Request
from scheduler.policies.demand import Wants, wants_of
from scheduler.policies.precision import FULL
from scheduler.policies.predictors.base import Forecast
from scheduler.policies.strategy import Strategy

Named = dict[int, int]
"""Expert -> rows."""


class Visits:
    """`open`: by visit. `plans`: prefill's experts are all assigned before their gates, as if all were predicted."""

    def __init__(
        self, shape: t.ModelShape, placement: Placement, strategy: Strategy, stock: Stock, sending: Calls,
        ids: Iterator[int], out: list[t.Command], plans: bool,
    ) -> None:  # fmt: skip
        self.open: dict[t.Visit, OpenVisit] = {}
        self.ordinal = {layer: i for i, layer in enumerate(shape.layers)}
        self.followed = False
        self._shape = shape
        self._placement = placement
        self._strategy = strategy
        self._stock = stock
        self._sending = sending
        self._ids = ids
        self._out = out
        self._plans = plans
        self._shapes_loads = strategy.precision.forms != (FULL,)
        self._tells = strategy.predictor.foresight == "attention"

    @property
    def predicted(self) -> bool:
        """Whether anybody predicts just now. `followed`: the shadow does."""
        return self.followed or self._strategy.predicts

    # --- passes and predictions ---------------------------------------------------------------------------------

    def begin(self, request: Request, event: t.PassStarted) -> None:
        request.reached = (event.position, -1)
        request.prefilling = event.prefill
        visit = t.Visit(event.request, event.position, self._shape.layers[0])
        self.expect(request, self._strategy.predictor.begun(visit, event.tokens, event.prefill))
        if event.prefill and self._plans:
            self._plan(request, event.request, event.position, 0)

    def _horizon(self) -> int:
        """How many layers ahead prefill assigns: enough to fill every slot while one layer computes."""
        return 1 + -(-self._stock.total // self._shape.experts)

    def _plan(self, request: Request, number: int, position: int, start: int) -> None:
        """Assign layers from ordinal `start` to the horizon, those that are not assigned yet."""
        stop = min(start + self._horizon(), len(self._shape.layers))
        for ordinal in range(request.planned, stop):
            visit = t.Visit(number, position, self._shape.layers[ordinal])
            opened = self.open.get(visit) or self._open(request, visit, ordinal)
            for expert, worker in enumerate(self._share(ordinal)):
                if expert not in opened.needs:
                    self._stock.want(self._need(opened, expert), worker)
        request.planned = max(request.planned, stop)

    def _share(self, ordinal: int) -> list[int]:
        return self._placement.share(self._stock.live, ordinal, self._shape.count(ordinal))

    def _open(self, request: Request, visit: t.Visit, ordinal: int) -> OpenVisit:
        turn = visit.position * len(self._shape.layers) + ordinal
        opened = self.open[visit] = OpenVisit(visit, request, turn)
        return opened

    def expect(self, request: Request, forecasts: Iterable[Forecast]) -> None:
        """What a predictor says."""
        for visit, experts, bring in forecasts:
            self.predict(request, visit, experts, bring)

    def predict(
        self, request: Request, visit: t.Visit, experts: tuple[int, ...], bring: tuple[int, ...] | None = None,
        wants: Wants | None = None,
    ) -> None:  # fmt: skip
        """`bring`: those to be in slots by then, where it is not all of `experts`."""
        if visit.position >= request.ledger.prompt_tokens:
            request.ledger.predicted(visit, experts)
        ordinal = self.ordinal[visit.layer]
        if (visit.position, ordinal) <= request.reached:
            request.ledger.late += 1
            return
        opened = self.open.get(visit) or self._open(request, visit, ordinal)
        needs, stock = opened.needs, self._stock
        wanted = experts if bring is None else bring
        for expert in [e for e in needs if e not in wanted] if needs else ():
            self.drop(needs.pop(expert))
        group = self._placement.group(stock.live, opened.turn) if stock.live else []
        for expert, worker in zip(wanted, itertools.cycle(group), strict=False):
            if expert not in needs:
                need = self._need(opened, expert)
                if wants is not None:
                    need.wanted = wants.of(expert)
                stock.want(need, worker)

    def foreseen(self, request: Request, event: t.Foreseen) -> None:
        """What the main model has computed for the predictor."""
        visit = t.Visit(event.request, event.position, event.layer)
        prefill = event.position < request.ledger.prompt_tokens
        resident = self._stock.resident(event.layer).keys()
        wants = wants_of(event.scores, self._shape.top_k, prefill) if self._shapes_loads else None
        for forecast in self._strategy.predictor.foreseen(visit, event.scores, resident, prefill):
            self.predict(request, *forecast, wants if forecast.visit == visit else None)

    def warm(self, number: int, request: Request) -> None:
        """Prefill is over: who is to be in the slots when decoding begins."""
        visit = t.Visit(number, request.ledger.prompt_tokens, -1)
        for expert in self._strategy.residency.warm(self._stock.total):
            if expert.expert in self._stock.resident(expert.layer):
                continue
            opened = self.open.get(visit) or self._open(request, visit, 0)
            opened.errand = True
            need = Need(next(self._ids), opened, expert)
            opened.needs[need.seq] = need
            self._stock.want(need, self._share(self.ordinal[expert.layer])[expert.expert])

    def _need(self, opened: OpenVisit, expert: int) -> Need:
        need = opened.needs[expert] = Need(next(self._ids), opened, t.ExpertId(opened.visit.layer, expert))
        return need

    # --- the gate -----------------------------------------------------------------------------------------------

    def fired(self, request: Request, event: t.GateFired, now: float) -> None:
        visit, strategy = event.visit, self._strategy
        ordinal = self.ordinal[visit.layer]
        opened = self.open.get(visit) or self._open(request, visit, ordinal)
        opened.since = now
        request.reached = (visit.position, ordinal)
        named = dict(event.rows)
        if not request.prefilling and self.predicted:
            request.ledger.activated(visit, tuple(named))
            request.ledger.in_time += sum(expert in opened.needs for expert in named)
        strategy.residency.observed(visit, named, event.scores, request.prefilling)
        forecasts = strategy.predictor.fired(visit, named, event.scores, request.prefilling)
        named = self._routed(opened, event, named)
        self._compare(opened, named)
        self._name(opened, event, named, ordinal)
        opened.left = len(named)
        if request.prefilling and self._plans:
            self._plan(request, visit.request, visit.position, ordinal + 1)
        if not named:
            self.finish(opened)
        self.expect(request, forecasts)

    def _routed(self, opened: OpenVisit, event: t.GateFired, named: Named) -> Named:
        """What is computed, by the router."""
        request, visit = opened.request, opened.visit
        present = self._present(opened)
        experts = event.chosen
        if event.scores and not request.prefilling:
            experts = self._strategy.router.route(event.chosen, event.scores, present)
        changed = experts != event.chosen
        if changed:
            named = dict(sorted(Counter(itertools.chain.from_iterable(experts)).items()))
        here = tuple(expert for expert in named if expert in present)
        request.ledger.gate(len(named), len(here), request.prefilling)
        if changed or self._tells:
            self._out.append(t.Route(visit, experts if changed else (), here))
        return named

    def _present(self, opened: OpenVisit) -> set[int]:
        """Experts of its layer whose bytes are in a slot, in whatever form."""
        needed = {need.expert.expert for need in opened.needs.values() if need.held is not None and need.held.loaded}
        return needed.union(e for e, held in self._stock.resident(opened.visit.layer).items() if held.loaded)

    def _compare(self, opened: OpenVisit, named: Named) -> None:
        """Prediction and truth: what is wrong is dropped."""
        request, needs = opened.request, opened.needs
        wrong = [] if needs.keys() == named.keys() else [e for e in needs if e not in named]
        for expert in wrong:
            need = needs.pop(expert)
            request.ledger.unused += need.held is not None and not need.hit
            self.drop(need)

    def _name(self, opened: OpenVisit, event: t.GateFired, named: Named, ordinal: int) -> None:
        """Every expert that the gate names is to be computed, those that were predicted first."""
        needs, waiting, confirm = opened.needs, 0, self._stock.confirm
        if self._shapes_loads or event.scores:
            self._weigh(opened, event, named)
        hosted = self._hosted(opened, named) if self._stock.hosts else ()
        missed = [] if len(needs) == len(named) and not hosted else [e for e in named if e not in needs]
        for expert, rows in named.items():
            need = needs.get(expert)
            if need is not None:
                need.rows = rows
                confirm(need)
                waiting += need.held is None or not need.held.loaded
        prefilling = opened.request.prefilling
        share = self._share(ordinal) if missed and prefilling and not self._plans else None
        for expert in self._in_order(missed, named, opened.wants):
            need = self._need(opened, expert)
            need.confirmed, need.rows = True, named[expert]
            if opened.wants is not None:
                need.wanted = opened.wants.of(expert)
            if expert in hosted:
                self._stock.host(need)
                continue
            need.late = share is None and expert not in opened.let_go
            self._stock.want(need, share[expert] if share is not None else None)
            waiting += need.held is None or not need.held.loaded
        opened.waiting = waiting

    def _weigh(self, opened: OpenVisit, event: t.GateFired, named: Named) -> None:
        """How much each expert is wanted, for the choice of its form, and for who is loaded first."""
        opened.wants = wants_of(event.scores, self._shape.top_k, opened.request.prefilling, named, event.chosen)
        for expert, need in opened.needs.items():
            need.wanted = opened.wants.of(expert)

    def _in_order(self, missed: list[int], named: Named, wants: Wants | None) -> list[int]:
        """Whose load begins first: who computes most rows, then who matters most. As they come, where rows are sent
        together or nothing is known of them."""
        if len(missed) < 2 or (self._plans and wants is None):
            return missed
        score = wants.score if wants is not None else {}
        return sorted(missed, key=lambda e: (-named[e], -(score.get(e) or 0.0), e))

    def _hosted(self, opened: OpenVisit, named: Named) -> Collection[int]:
        """Which experts the host computes. Predictions of them are over."""
        needs, costs = opened.needs, self._stock.costs
        on_the_way = self._stock.resident(opened.visit.layer)
        here: dict[int, int] = {}
        missing: dict[int, int] = {}
        for expert, rows in named.items():
            need = needs.get(expert)
            there = expert in on_the_way or (need is not None and need.held is not None)
            (here if there else missing)[expert] = rows
        hosted = self._strategy.split.host(missing, here, costs, opened.request.prefilling)
        for expert in hosted:
            need = needs.pop(expert, None)
            if need is not None:
                self.drop(need)
        return hosted

    def finish(self, opened: OpenVisit) -> None:
        del self.open[opened.visit]
        self._out.append(t.Resume(opened.visit))

    def drop(self, need: Need) -> None:
        self._sending.forget(need)
        self._stock.drop(need)
