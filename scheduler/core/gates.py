"""At a layer's gates: which experts are needed now, for all passes of a step together."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

from scheduler import types as t
from scheduler.core.commands import Commands
from scheduler.core.slots import SlotTable
from scheduler.core.state import LayerVisit, Origin, SlotEntry, State
from scheduler.core.visits import VisitTable
from scheduler.core.workers import WorkerTable
from scheduler.policies.importance import LayerImportance, importance_of
from scheduler.policies.placement import Costs
from scheduler.policies.precision import FULL
from scheduler.policies.predictors.base import Forecast
from scheduler.policies.routers import Chosen
from scheduler.policies.strategy import Strategy

RowCounts = dict[int, int]
"""Expert -> rows."""


class Gate(NamedTuple):
    """One pass at the layer."""

    opened: LayerVisit
    event: t.GateFired
    rows: RowCounts
    """The experts that compute, ascending: the gate's, or those that the router puts in their place."""


class GateTable:
    """Turns gates into demands. `plans`: prefill assigns every expert before its gate (prefill `ahead`)."""

    def __init__(
        self,
        state: State,
        commands: Commands,
        visits: VisitTable,
        workers: WorkerTable,
        slots: SlotTable,
        strategy: Strategy,
        plans: bool,
    ) -> None:
        self._state = state
        self._commands = commands
        self._visits = visits
        self._workers = workers
        self._slots = slots
        self._strategy = strategy
        self._plans = plans
        self._weighs_forms = strategy.precision.forms != (FULL,)
        self._reports_residents = strategy.predictor.foresight == "attention"

    def note(self, event: t.GateFired, predicted: bool) -> None:
        """A gate has fired: count it. What is predicted for its rows from now on is late, even if the other passes of
        the step are not there yet. `predicted`: there are predictions just now."""
        visit, request = event.visit, self._state.requests[event.visit.request]
        opened = self._visits.open(request, visit)
        request.reached = (visit.position, self._visits.ordinal[visit.layer])
        if request.prefilling or not predicted:
            return
        chosen = event.chosen if request.in_block else (tuple(expert for expert, _ in event.rows),)
        for number, row in enumerate(chosen):
            request.stats.add_activation(visit._replace(position=visit.position + number), row)
            request.stats.in_time += sum(expert in opened.demands for expert in row)

    def fire(self, events: list[t.GateFired]) -> tuple[list[Gate], list[Iterable[Forecast]]]:
        """The router decides which experts compute; wrong prefetches are cancelled, right ones confirmed, and the
        experts that were not predicted are loaded now.

        Returns the gates, and the predictor's forecasts for each.
        """
        forecasts = [self._pass_to_policies(event) for event in events]
        gates = self._route(events)
        if len(gates) > 1:
            self._pass_on(gates)
            self._share_prefetches(gates)
        for gate in gates:
            self._cancel_mispredicted(gate)
        self._demand(gates)
        return gates, forecasts

    def _pass_to_policies(self, event: t.GateFired) -> Iterable[Forecast]:
        visit, strategy, chosen = event.visit, self._strategy, dict(event.rows)
        prefilling = self._state.requests[visit.request].prefilling
        strategy.residency.on_gate_fired(visit, chosen, event.scores, prefilling)
        if self._workers.host_memory.memories:
            strategy.host_residency.on_gate_fired(visit, chosen, event.scores, prefilling)
        return strategy.predictor.on_gate_fired(visit, chosen, event.scores, prefilling)

    # --- routing ------------------------------------------------------------------------------------------------

    def _route(self, events: list[t.GateFired]) -> list[Gate]:
        """The router sees the rows of all decoding passes at once (importance, 5.4)."""
        opened = [self._state.visits[event.visit] for event in events]
        present = self._slots.present(events[0].visit.layer)
        routed: dict[t.Visit, Chosen] = {}
        scored = [e for e, one in zip(events, opened, strict=True) if e.scores and not one.request.prefilling]
        if scored:
            chosen = tuple(row for event in scored for row in event.chosen)
            scores = tuple(row for event in scored for row in event.scores)
            experts = self._strategy.router.route(chosen, scores, present)
            rows = iter(experts)
            if experts is not chosen:
                routed = {event.visit: tuple(itertools.islice(rows, len(event.chosen))) for event in scored}
        counted: set[int] = set()
        return [
            self._build_gate(one, event, routed.get(event.visit, event.chosen), present, counted)
            for one, event in zip(opened, events, strict=True)
        ]

    def _build_gate(
        self, opened: LayerVisit, event: t.GateFired, experts: Chosen, present: set[int], counted: set[int]
    ) -> Gate:
        """`counted`: the misses of the step's gates before this one, to which its own are added."""
        chosen, changed = dict(event.rows), experts != event.chosen
        if changed:
            chosen = dict(sorted(Counter(itertools.chain.from_iterable(experts)).items()))
        opened.importance = self._importance(opened, event, chosen)
        if self._weighs_forms:
            present = self._slots.present(opened.id.layer, opened.importance)
        here = tuple(expert for expert in chosen if expert in present)
        stats, prefilling = opened.request.stats, opened.request.prefilling
        missed = set() if prefilling else chosen.keys() - present - counted
        counted |= missed
        stats.gate(sum(chosen.values()), sum(chosen[expert] for expert in here), len(missed), prefilling)
        if changed or self._reports_residents:
            self._commands.route(opened.id, experts if changed else (), here)
        return Gate(opened, event, chosen)

    def _importance(self, opened: LayerVisit, event: t.GateFired, rows: RowCounts) -> LayerImportance | None:
        """How much each expert matters: decides the form it is loaded in, and which is loaded first."""
        if not self._weighs_forms and not event.scores:
            return None
        prefilling, top_k = opened.request.prefilling, self._state.shape.top_k
        return importance_of(event.scores, top_k, prefilling, rows, event.chosen)

    # --- prefetches ---------------------------------------------------------------------------------------------

    def _pass_on(self, gates: list[Gate]) -> None:
        """A prefetch that was wrong for its own pass goes to another one that needs the expert."""
        for gate in gates:
            for expert in [e for e in gate.opened.demands if e not in gate.rows]:
                heirs = (one.opened for one in gates if expert in one.rows and expert not in one.opened.demands)
                heir = next(heirs, None)
                if heir is not None:
                    demand = heir.demands[expert] = gate.opened.demands.pop(expert)
                    demand.visit, demand.hit = heir, demand.entry is not None

    def _share_prefetches(self, gates: list[Gate]) -> None:
        """An expert that was predicted for one pass serves all that need it."""
        brought = {expert for gate in gates for expert in gate.opened.demands}
        for gate in gates:
            for expert in gate.rows:
                demand = gate.opened.demands.get(expert)
                if demand is not None:
                    self._slots.attach(demand)
                elif expert in brought:
                    self._slots.place(self._visits.demand(gate.opened, expert, "prediction"))

    def _cancel_mispredicted(self, gate: Gate) -> None:
        demands, rows = gate.opened.demands, gate.rows
        for expert in [e for e in demands if e not in rows] if demands.keys() != rows.keys() else ():
            demand = demands.pop(expert)
            gate.opened.request.stats.unused += demand.entry is not None and not demand.hit
            self._slots.cancel(demand)

    # --- demands ------------------------------------------------------------------------------------------------

    def _demand(self, gates: list[Gate]) -> None:
        """Every routed expert is to be computed; those that were predicted come first."""
        for opened in [gate.opened for gate in gates]:
            if opened.importance is not None:
                for expert, predicted in opened.demands.items():
                    predicted.importance = opened.importance.importance_of(expert)
        hosted = self._host_computed(gates) if self._workers.hosts else ()
        missed: list[tuple[Gate, int]] = []
        for gate in gates:
            opened, demands, rows = gate.opened, gate.opened.demands, gate.rows
            missed += [(gate, expert) for expert in rows if expert not in demands]
            opened.uncomputed = len(rows)
            opened.begin_stall(len(rows) - sum(expert in rows for expert in hosted), self._state.now)
            for expert, count in rows.items():
                demand = demands.get(expert)
                if demand is not None:
                    demand.rows = count
                    self._slots.confirm(demand)
        for gate, expert in self._load_order(missed, gates):
            self._demand_missed(gate, expert, expert in hosted)

    def _demand_missed(self, gate: Gate, expert: int, hosted: bool) -> None:
        """No prefetch has brought the expert."""
        opened = gate.opened
        demand = self._visits.demand(opened, expert, self._origin(opened, expert, hosted))
        demand.confirmed, demand.rows = True, gate.rows[expert]
        if opened.importance is not None:
            demand.importance = opened.importance.importance_of(expert)
        if hosted:
            self._slots.place_on_host(demand)
        elif opened.request.prefilling and not self._plans:
            self._slots.place(demand, self._workers.share(self._visits.ordinal[opened.id.layer])[expert])
        else:
            self._slots.place(demand)

    def _origin(self, opened: LayerVisit, expert: int, hosted: bool) -> Origin:
        if hosted:
            return "host"
        if opened.request.prefilling and not self._plans:
            return "plan"
        return "prediction" if expert in opened.unloadable else "gate"

    def _load_order(self, missed: list[tuple[Gate, int]], gates: list[Gate]) -> list[tuple[Gate, int]]:
        """Experts with most rows first, then those that matter most. As the gate has them where rows are sent together
        or their importance is not known."""
        if len(missed) < 2 or (self._plans and all(gate.opened.importance is None for gate in gates)):
            return missed
        rows: Counter[int] = Counter()
        score: dict[int, float] = {}
        for gate in gates:
            rows.update(gate.rows)
            if gate.opened.importance is not None:
                for expert, value in gate.opened.importance.score.items():
                    score[expert] = max(value, score.get(expert, value))
        return sorted(missed, key=lambda one: (-rows[one[1]], -score.get(one[1], 0.0), one[1]))

    def _host_computed(self, gates: list[Gate]) -> Collection[int]:
        """The experts that a host place computes. Prefetches of them are cancelled. A load in flight counts as a miss
        if the host would have computed the expert before it ends: the gate would wait for it."""
        layer, costs = gates[0].opened.id.layer, self._workers.costs
        kept = self._slots.resident(layer)
        here: RowCounts = {}
        missing: RowCounts = {}
        rows: Counter[int] = Counter()
        for gate in gates:
            rows.update(gate.rows)
        for expert in sorted(rows):
            if not self._workers.has_host(t.ExpertId(layer, expert)):
                continue
            demands = [demand for gate in gates if (demand := gate.opened.demands.get(expert)) is not None]
            entry = next((demand.entry for demand in demands if demand.entry is not None), kept.get(expert))
            there = entry is not None and self._left_s(entry, costs) <= costs.host_s(rows[expert])
            (here if there else missing)[expert] = rows[expert]
        prefilling = any(gate.opened.request.prefilling for gate in gates)
        hosted = self._strategy.placement.host(missing, here, costs, prefilling)
        for gate in gates:
            for expert in hosted:
                demand = gate.opened.demands.pop(expert, None)
                if demand is not None:
                    self._slots.cancel(demand)
        return hosted

    def _left_s(self, entry: SlotEntry, costs: Costs) -> float:
        worker = self._state.workers[entry.worker]
        load_s = worker.joined.host_load_s if entry.in_memory and worker.joined.host_load_s else costs.load_s
        return worker.load_left_s(entry, load_s, self._state.now)
