"""From a pass's beginning to its gates: what is brought into slots before a gate has fired, and what once it has."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from scheduler import types as t
from scheduler.core.dispatch import RowDispatcher
from scheduler.core.groups import Grouping
from scheduler.core.slots import SlotTable
from scheduler.core.state import Demand, LayerVisit, Request
from scheduler.policies.importance import LayerImportance, importance_of
from scheduler.policies.precision import FULL
from scheduler.policies.predictors.base import Forecast
from scheduler.policies.strategy import Strategy

RowCounts = dict[int, int]
"""Expert -> rows."""


class PassTracker:
    """`open`: by visit. `plans`: prefill's experts are all assigned before their gates, as if all were predicted."""

    def __init__(
        self, shape: t.ModelShape, grouping: Grouping, strategy: Strategy, slots: SlotTable, dispatcher: RowDispatcher,
        ids: Iterator[int], out: list[t.Command], plans: bool,
    ) -> None:  # fmt: skip
        self.open: dict[t.Visit, LayerVisit] = {}
        self.ordinal = {layer: i for i, layer in enumerate(shape.layers)}
        self.followed = False
        self._shape = shape
        self._grouping = grouping
        self._strategy = strategy
        self._slots = slots
        self._dispatch = dispatcher
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
        self.receive_forecasts(request, self._strategy.predictor.begun(visit, event.tokens, event.prefill))
        if event.prefill and self._plans:
            self._plan(request, event.request, event.position, 0)

    def _horizon(self) -> int:
        """How many layers ahead prefill assigns: enough to fill every slot while one layer computes."""
        return 1 + -(-self._slots.total // self._shape.experts)

    def _plan(self, request: Request, number: int, position: int, start: int) -> None:
        """Assign layers from ordinal `start` to the horizon, those that are not assigned yet."""
        stop = min(start + self._horizon(), len(self._shape.layers))
        for ordinal in range(request.planned, stop):
            visit = t.Visit(number, position, self._shape.layers[ordinal])
            opened = self.open.get(visit) or self._open(request, visit, ordinal)
            for expert, worker in enumerate(self._share(ordinal)):
                if expert not in opened.demands:
                    self._slots.place(self._demand(opened, expert), worker)
        request.planned = max(request.planned, stop)

    def _share(self, ordinal: int) -> list[int]:
        return self._grouping.share(self._slots.live, ordinal, self._shape.count(ordinal))

    def _open(self, request: Request, visit: t.Visit, ordinal: int) -> LayerVisit:
        turn = visit.position * len(self._shape.layers) + ordinal
        opened = self.open[visit] = LayerVisit(visit, request, turn)
        return opened

    def receive_forecasts(self, request: Request, forecasts: Iterable[Forecast]) -> None:
        """What a predictor says."""
        for visit, experts, bring in forecasts:
            self.receive_prediction(request, visit, experts, bring)

    def receive_prediction(
        self, request: Request, visit: t.Visit, experts: tuple[int, ...], bring: tuple[int, ...] | None = None,
        importance: LayerImportance | None = None,
    ) -> None:  # fmt: skip
        """`bring`: those to be in slots by then, where it is not all of `experts`."""
        if visit.position >= request.stats.prompt_tokens:
            request.stats.predicted(visit, experts)
        ordinal = self.ordinal[visit.layer]
        if (visit.position, ordinal) <= request.reached:
            request.stats.late += 1
            return
        opened = self.open.get(visit) or self._open(request, visit, ordinal)
        demands, slots = opened.demands, self._slots
        wanted = experts if bring is None else bring
        for expert in [e for e in demands if e not in wanted] if demands else ():
            self.cancel(demands.pop(expert))
        group = self._grouping.group(slots.live, opened.turn) if slots.live else []
        for expert, worker in zip(wanted, itertools.cycle(group), strict=False):
            if expert not in demands:
                demand = self._demand(opened, expert)
                if importance is not None:
                    demand.importance = importance.of(expert)
                slots.place(demand, worker)

    def foreseen(self, request: Request, event: t.Foreseen) -> None:
        """What the main model has computed for the predictor."""
        visit = t.Visit(event.request, event.position, event.layer)
        prefill = event.position < request.stats.prompt_tokens
        resident = self._slots.resident(event.layer).keys()
        importance = importance_of(event.scores, self._shape.top_k, prefill) if self._shapes_loads else None
        for forecast in self._strategy.predictor.foreseen(visit, event.scores, resident, prefill):
            self.receive_prediction(request, *forecast, importance if forecast.visit == visit else None)

    def begin_warm_up(self, number: int, request: Request) -> None:
        """Prefill is over: who is to be in the slots when decoding begins."""
        visit = t.Visit(number, request.stats.prompt_tokens, -1)
        for expert in self._strategy.residency.warm(self._slots.total):
            if expert.expert in self._slots.resident(expert.layer):
                continue
            opened = self.open.get(visit) or self._open(request, visit, 0)
            opened.warm_up = True
            demand = Demand(next(self._ids), opened, expert)
            opened.demands[demand.seq] = demand
            self._slots.place(demand, self._share(self.ordinal[expert.layer])[expert.expert])

    def _demand(self, opened: LayerVisit, expert: int) -> Demand:
        demand = opened.demands[expert] = Demand(next(self._ids), opened, t.ExpertId(opened.visit.layer, expert))
        return demand

    # --- the gate -----------------------------------------------------------------------------------------------

    def gate_fired(self, request: Request, event: t.GateFired, now: float) -> None:
        visit, strategy = event.visit, self._strategy
        ordinal = self.ordinal[visit.layer]
        opened = self.open.get(visit) or self._open(request, visit, ordinal)
        opened.since = now
        request.reached = (visit.position, ordinal)
        named = dict(event.rows)
        if not request.prefilling and self.predicted:
            request.stats.activated(visit, tuple(named))
            request.stats.in_time += sum(expert in opened.demands for expert in named)
        strategy.residency.observed(visit, named, event.scores, request.prefilling)
        forecasts = strategy.predictor.fired(visit, named, event.scores, request.prefilling)
        named = self._routed(opened, event, named)
        self._cancel_mispredicted(opened, named)
        self._demand_named(opened, event, named, ordinal)
        opened.left = len(named)
        if request.prefilling and self._plans:
            self._plan(request, visit.request, visit.position, ordinal + 1)
        if not named:
            self.finish(opened)
        self.receive_forecasts(request, forecasts)

    def _routed(self, opened: LayerVisit, event: t.GateFired, named: RowCounts) -> RowCounts:
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
        request.stats.gate(len(named), len(here), request.prefilling)
        if changed or self._tells:
            self._out.append(t.Route(visit, experts if changed else (), here))
        return named

    def _present(self, opened: LayerVisit) -> set[int]:
        """Experts of its layer whose bytes are in a slot, in whatever form."""
        needed = {
            demand.expert.expert for demand in opened.demands.values() if demand.held is not None and demand.held.loaded
        }
        return needed.union(e for e, held in self._slots.resident(opened.visit.layer).items() if held.loaded)

    def _cancel_mispredicted(self, opened: LayerVisit, named: RowCounts) -> None:
        """Prediction and truth: what is wrong is dropped."""
        request, demands = opened.request, opened.demands
        wrong = [] if demands.keys() == named.keys() else [e for e in demands if e not in named]
        for expert in wrong:
            demand = demands.pop(expert)
            request.stats.unused += demand.held is not None and not demand.hit
            self.cancel(demand)

    def _demand_named(self, opened: LayerVisit, event: t.GateFired, named: RowCounts, ordinal: int) -> None:
        """Every expert that the gate names is to be computed, those that were predicted first."""
        demands, waiting, confirm = opened.demands, 0, self._slots.confirm
        if self._shapes_loads or event.scores:
            self._weigh(opened, event, named)
        hosted = self._host_computed(opened, named) if self._slots.hosts else ()
        missed = [] if len(demands) == len(named) and not hosted else [e for e in named if e not in demands]
        for expert, rows in named.items():
            demand = demands.get(expert)
            if demand is not None:
                demand.rows = rows
                confirm(demand)
                waiting += demand.held is None or not demand.held.loaded
        prefilling = opened.request.prefilling
        share = self._share(ordinal) if missed and prefilling and not self._plans else None
        for expert in self._in_order(missed, named, opened.importance):
            demand = self._demand(opened, expert)
            demand.confirmed, demand.rows = True, named[expert]
            if opened.importance is not None:
                demand.importance = opened.importance.of(expert)
            if expert in hosted:
                self._slots.place_on_host(demand)
                continue
            demand.reload = share is None and expert not in opened.given_up
            self._slots.place(demand, share[expert] if share is not None else None)
            waiting += demand.held is None or not demand.held.loaded
        opened.waiting = waiting

    def _weigh(self, opened: LayerVisit, event: t.GateFired, named: RowCounts) -> None:
        """How much each expert is wanted, for the choice of its form, and for who is loaded first."""
        opened.importance = importance_of(
            event.scores, self._shape.top_k, opened.request.prefilling, named, event.chosen
        )
        for expert, demand in opened.demands.items():
            demand.importance = opened.importance.of(expert)

    def _in_order(self, missed: list[int], named: RowCounts, importance: LayerImportance | None) -> list[int]:
        """Whose load begins first: who computes most rows, then who matters most. As they come, where rows are sent
        together or nothing is known of them."""
        if len(missed) < 2 or (self._plans and importance is None):
            return missed
        score = importance.score if importance is not None else {}
        return sorted(missed, key=lambda e: (-named[e], -(score.get(e) or 0.0), e))

    def _host_computed(self, opened: LayerVisit, named: RowCounts) -> Collection[int]:
        """Which experts the host computes. Predictions of them are over."""
        demands, costs = opened.demands, self._slots.costs
        on_the_way = self._slots.resident(opened.visit.layer)
        here: dict[int, int] = {}
        missing: dict[int, int] = {}
        for expert, rows in named.items():
            demand = demands.get(expert)
            there = expert in on_the_way or (demand is not None and demand.held is not None)
            (here if there else missing)[expert] = rows
        hosted = self._strategy.placement.host(missing, here, costs, opened.request.prefilling)
        for expert in hosted:
            demand = demands.pop(expert, None)
            if demand is not None:
                self.cancel(demand)
        return hosted

    def finish(self, opened: LayerVisit) -> None:
        del self.open[opened.visit]
        self._out.append(t.Resume(opened.visit))

    def cancel(self, demand: Demand) -> None:
        self._dispatch.forget(demand)
        self._slots.cancel(demand)
