"""From a pass's start to its gates: which experts are prefetched before a gate has fired, and which are needed then."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable

from scheduler import types as t
from scheduler.core.commands import Commands
from scheduler.core.shadow import ShadowFollower
from scheduler.core.slots import SlotTable
from scheduler.core.state import Demand, LayerVisit, Origin, Request, State
from scheduler.core.workers import WorkerTable
from scheduler.policies.importance import LayerImportance, importance_of
from scheduler.policies.precision import FULL
from scheduler.policies.predictors.base import Forecast
from scheduler.policies.strategy import Strategy

RowCounts = dict[int, int]
"""Expert -> rows."""


class PassTracker:
    """Turns predictions and gates into demands. `plans`: prefill assigns every expert before its gate (prefill
    `ahead`)."""

    def __init__(
        self,
        state: State,
        commands: Commands,
        workers: WorkerTable,
        slots: SlotTable,
        shadow: ShadowFollower,
        strategy: Strategy,
        plans: bool,
    ) -> None:
        self._state = state
        self._commands = commands
        self._workers = workers
        self._slots = slots
        self._shadow = shadow
        self._strategy = strategy
        self._plans = plans
        self._ordinal = {layer: ordinal for ordinal, layer in enumerate(state.shape.layers)}
        self._weighs_forms = strategy.precision.forms != (FULL,)
        self._reports_residents = strategy.predictor.foresight == "attention"

    @property
    def _predicted(self) -> bool:
        """There are predictions just now, by the shadow or by a predictor."""
        return self._shadow.present or self._strategy.predicts

    # --- passes and predictions ---------------------------------------------------------------------------------

    def begin(self, passes: tuple[t.Pass, ...]) -> None:
        """A step of the main model begins."""
        for one in passes:
            request = self._state.requests.get(one.request)
            if request is not None:
                self._begin_pass(request, one)

    def _begin_pass(self, request: Request, one: t.Pass) -> None:
        request.reached = (one.position, -1)
        request.prefilling = one.prefill
        visit = t.Visit(one.request, one.position, self._state.shape.layers[0])
        self._prefetch_forecasts(request, self._strategy.predictor.begun(visit, one.tokens, one.prefill))
        if one.prefill and self._plans:
            self._plan(request, one.request, one.position, 0)

    def prefetch(
        self,
        request: Request,
        visit: t.Visit,
        experts: tuple[int, ...],
        bring: tuple[int, ...] | None = None,
        importance: LayerImportance | None = None,
    ) -> None:
        """A prediction has come: `experts` are expected, `bring` of them are prefetched; None: all. It replaces the
        prediction that the visit had before. One that comes after its gate is late, and only counted."""
        if visit.position >= request.stats.prompt_tokens:
            request.stats.predicted(visit, experts)
        ordinal = self._ordinal[visit.layer]
        if (visit.position, ordinal) <= request.reached:
            request.stats.late += 1
            return
        expected = experts if bring is None else bring
        opened = self._opened(request, visit, ordinal)
        demands = opened.demands
        if opened.unloadable:
            opened.unloadable = tuple(expert for expert in opened.unloadable if expert in expected)
        for expert in [e for e in demands if e not in expected] if demands else ():
            self._slots.cancel(demands.pop(expert))
        for expert, worker in zip(expected, itertools.cycle(self._workers.group(opened.turn)), strict=False):
            if expert not in demands:
                demand = self._demand(opened, expert, "prediction")
                if importance is not None:
                    demand.importance = importance.of(expert)
                self._slots.place(demand, worker)

    def _prefetch_forecasts(self, request: Request, forecasts: Iterable[Forecast]) -> None:
        for visit, experts, bring in forecasts:
            self.prefetch(request, visit, experts, bring)

    def foreseen(self, request: Request, event: t.Foreseen) -> None:
        """The main model has computed scores that a predictor reads."""
        visit = t.Visit(event.request, event.position, event.layer)
        prefill = event.position < request.stats.prompt_tokens
        resident = self._slots.resident(event.layer).keys()
        top_k = self._state.shape.top_k
        importance = importance_of(event.scores, top_k, prefill) if self._weighs_forms else None
        for forecast in self._strategy.predictor.foreseen(visit, event.scores, resident, prefill):
            self.prefetch(request, *forecast, importance if forecast.visit == visit else None)

    def warm_up(self, number: int, request: Request) -> None:
        """Prefill is over: bring in what the residency wants in the slots when decoding begins."""
        visit = t.Visit(number, request.stats.prompt_tokens, -1)
        for expert in self._strategy.residency.warm(self._workers.slots):
            if expert.expert in self._slots.resident(expert.layer):
                continue
            opened = self._opened(request, visit, 0)
            demand = Demand(self._commands.next_id(), opened, expert, "warm-up")
            opened.demands[demand.seq] = demand
            self._slots.place(demand, self._workers.share(self._ordinal[expert.layer])[expert.expert])

    def _plan(self, request: Request, number: int, position: int, start: int) -> None:
        """Assign layers from ordinal `start` to the horizon, those that are not assigned yet."""
        layers = self._state.shape.layers
        stop = min(start + self._horizon(), len(layers))
        for ordinal in range(request.planned, stop):
            opened = self._opened(request, t.Visit(number, position, layers[ordinal]), ordinal)
            for expert, worker in enumerate(self._workers.share(ordinal)):
                if expert not in opened.demands:
                    self._slots.place(self._demand(opened, expert, "plan"), worker)
        request.planned = max(request.planned, stop)

    def _horizon(self) -> int:
        """How many layers ahead prefill assigns: enough to fill every slot while one layer computes."""
        return 1 + -(-self._workers.slots // self._state.shape.experts)

    def _opened(self, request: Request, visit: t.Visit, ordinal: int) -> LayerVisit:
        opened = self._state.visits.get(visit)
        if opened is None:
            turn = visit.position * len(self._state.shape.layers) + ordinal
            opened = self._state.visits[visit] = LayerVisit(visit, request, turn)
        return opened

    def _demand(self, opened: LayerVisit, expert: int, origin: Origin) -> Demand:
        identity = t.ExpertId(opened.id.layer, expert)
        demand = opened.demands[expert] = Demand(self._commands.next_id(), opened, identity, origin)
        return demand

    # --- the gate -----------------------------------------------------------------------------------------------

    def gate_fired(self, request: Request, event: t.GateFired) -> None:
        """The router decides which experts compute; wrong prefetches are cancelled, right ones confirmed, and the
        experts that were not predicted are loaded now."""
        visit, strategy, chosen = event.visit, self._strategy, dict(event.rows)
        ordinal = self._ordinal[visit.layer]
        opened = self._opened(request, visit, ordinal)
        request.reached = (visit.position, ordinal)
        if not request.prefilling and self._predicted:
            request.stats.activated(visit, tuple(chosen))
            request.stats.in_time += sum(expert in opened.demands for expert in chosen)
        strategy.residency.observed(visit, chosen, event.scores, request.prefilling)
        forecasts = strategy.predictor.fired(visit, chosen, event.scores, request.prefilling)
        routed = self._route(opened, event, chosen)
        self._cancel_mispredicted(opened, routed)
        self._demand_routed(opened, event, routed, ordinal)
        if request.prefilling and self._plans:
            self._plan(request, visit.request, visit.position, ordinal + 1)
        if not routed:
            self.finish(opened)
        self._prefetch_forecasts(request, forecasts)

    def _route(self, opened: LayerVisit, event: t.GateFired, chosen: RowCounts) -> RowCounts:
        """The experts that compute: the gate's, or those that the router puts in their place."""
        request, present = opened.request, self._present(opened)
        experts = event.chosen
        if event.scores and not request.prefilling:
            experts = self._strategy.router.route(event.chosen, event.scores, present)
        changed = experts is not event.chosen and experts != event.chosen
        if changed:
            chosen = dict(sorted(Counter(itertools.chain.from_iterable(experts)).items()))
        here = tuple(expert for expert in chosen if expert in present)
        request.stats.gate(len(chosen), len(here), request.prefilling)
        if changed or self._reports_residents:
            self._commands.route(opened.id, experts if changed else (), here)
        return chosen

    def _present(self, opened: LayerVisit) -> set[int]:
        """Experts of its layer whose bytes are in a slot, in whatever form."""
        ready = {expert for expert, demand in opened.demands.items() if demand.state == "ready"}
        kept = self._slots.resident(opened.id.layer)
        return ready.union(expert for expert, entry in kept.items() if entry.loaded) if kept else ready

    def _cancel_mispredicted(self, opened: LayerVisit, routed: RowCounts) -> None:
        demands = opened.demands
        for expert in [e for e in demands if e not in routed] if demands.keys() != routed.keys() else ():
            demand = demands.pop(expert)
            opened.request.stats.unused += demand.entry is not None and not demand.hit
            self._slots.cancel(demand)

    def _demand_routed(self, opened: LayerVisit, event: t.GateFired, routed: RowCounts, ordinal: int) -> None:
        """Every routed expert is to be computed; those that were predicted come first."""
        demands, prefilling = opened.demands, opened.request.prefilling
        if self._weighs_forms or event.scores:
            self._weigh(opened, event, routed)
        hosted = self._host_computed(opened, routed) if self._workers.hosts else ()
        missed = [expert for expert in routed if expert not in demands] if len(demands) < len(routed) else []
        opened.uncomputed = len(routed)
        opened.begin_stall(len(routed) - len(hosted), self._state.now)
        for expert, rows in routed.items():
            demand = demands.get(expert)
            if demand is not None:
                demand.rows = rows
                self._slots.confirm(demand)
        if not missed:
            return
        share = self._workers.share(ordinal) if prefilling and not self._plans else None
        for expert in self._load_order(missed, routed, opened.importance):
            demand = self._demand(opened, expert, self._origin(opened, expert, expert in hosted))
            demand.confirmed, demand.rows = True, routed[expert]
            if opened.importance is not None:
                demand.importance = opened.importance.of(expert)
            if expert in hosted:
                self._slots.place_on_host(demand)
            else:
                self._slots.place(demand, share[expert] if share is not None else None)

    def _origin(self, opened: LayerVisit, expert: int, hosted: bool) -> Origin:
        """Of an expert that no prefetch has brought."""
        if hosted:
            return "host"
        if opened.request.prefilling and not self._plans:
            return "plan"
        return "prediction" if expert in opened.unloadable else "gate"

    def _weigh(self, opened: LayerVisit, event: t.GateFired, routed: RowCounts) -> None:
        """How much each expert matters: decides the form it is loaded in, and which is loaded first."""
        prefilling = opened.request.prefilling
        opened.importance = importance_of(event.scores, self._state.shape.top_k, prefilling, routed, event.chosen)
        for expert, demand in opened.demands.items():
            demand.importance = opened.importance.of(expert)

    def _load_order(self, missed: list[int], routed: RowCounts, importance: LayerImportance | None) -> list[int]:
        """Experts with most rows first, then those that matter most. As the gate has them where rows are sent together
        or their importance is not known."""
        if len(missed) < 2 or (self._plans and importance is None):
            return missed
        score = importance.score if importance is not None else {}
        return sorted(missed, key=lambda e: (-routed[e], -(score.get(e) or 0.0), e))

    def _host_computed(self, opened: LayerVisit, routed: RowCounts) -> Collection[int]:
        """The experts that a host place computes. Prefetches of them are cancelled."""
        demands, kept = opened.demands, self._slots.resident(opened.id.layer)
        here: RowCounts = {}
        missing: RowCounts = {}
        for expert, rows in routed.items():
            demand = demands.get(expert)
            there = expert in kept or (demand is not None and demand.entry is not None)
            (here if there else missing)[expert] = rows
        hosted = self._strategy.placement.host(missing, here, self._workers.costs, opened.request.prefilling)
        for expert in hosted:
            demand = demands.pop(expert, None)
            if demand is not None:
                self._slots.cancel(demand)
        return hosted

    # --- its end ------------------------------------------------------------------------------------------------

    def computed(self, demand: Demand) -> None:
        """All rows of a demand have come back. With the last demand the main model goes on."""
        opened = demand.visit
        if demand.hit:
            opened.request.stats.reuse(opened.request.prefilling)
        elif demand.state == "hosted":
            opened.request.stats.hosted(opened.request.prefilling)
        self._slots.computed(demand)
        del opened.demands[demand.expert.expert]
        opened.uncomputed -= 1
        if opened.uncomputed == 0:
            self.finish(opened)

    def finish(self, opened: LayerVisit) -> None:
        del self._state.visits[opened.id]
        self._commands.resume(opened.id)

    def close(self, request: int) -> None:
        """Cancel every demand of a request."""
        visits = self._state.visits
        for visit in [v for v in visits if v.request == request]:
            for demand in visits.pop(visit).demands.values():
                self._slots.cancel(demand)
