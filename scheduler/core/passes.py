"""From a step's start to its end: what is predicted for its passes, and when their gates count as fired."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

from scheduler import types as t
from scheduler.core.commands import Commands
from scheduler.core.gates import GateTable
from scheduler.core.shadow import ShadowFollower
from scheduler.core.slots import SlotTable
from scheduler.core.state import Demand, LayerVisit, Request, State
from scheduler.core.visits import VisitTable
from scheduler.core.workers import WorkerTable
from scheduler.policies.importance import LayerImportance, importance_of
from scheduler.policies.precision import FULL
from scheduler.policies.predictors.base import Forecast
from scheduler.policies.strategy import Strategy


class PassTracker:
    """Turns predictions into prefetches, and unites the passes of a step at each layer. `plans`: prefill assigns every
    expert before its gate (prefill `ahead`)."""

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
        self._visits = VisitTable(state, commands)
        self._gates = GateTable(state, commands, self._visits, workers, slots, strategy, plans)
        self._weighs_forms = strategy.precision.forms != (FULL,)

    @property
    def _has_predictions(self) -> bool:
        """There are predictions just now, by the shadow or by a predictor."""
        return self._shadow.present or self._strategy.predicts

    # --- steps --------------------------------------------------------------------------------------------------

    def begin(self, passes: tuple[t.Pass, ...]) -> None:
        """A step of the main model begins."""
        state, step = self._state, self._state.step
        step.number += 1
        step.gates.clear()
        step.passes = {one.request: one for one in passes if one.request in state.requests}
        over = step.number * len(state.shape.layers)
        state.spread = {due: counts for due, counts in state.spread.items() if due >= over}
        moved = self._note_absent()
        for one in step.passes.values():
            moved |= self._locate(state.requests[one.request], one)
        if moved:
            self._slots.reorder()
        if any(state.requests[number].in_block for number in step.passes):
            self._spread_rows()
        for one in step.passes.values():
            self._begin_pass(state.requests[one.request], one)

    def _note_absent(self) -> bool:
        """Whether a request has left the steps, or come back."""
        changed, step = False, self._state.step
        for number, request in self._state.requests.items():
            absent = number not in step.passes
            changed |= absent is not request.absent
            request.absent = absent
        step.absent = len(step.passes) < len(self._state.requests)
        return changed

    def _locate(self, request: Request, one: t.Pass) -> bool:
        """Where the request is now. Whether what is predicted for it is due at another time than was expected."""
        lead = self._state.step.number - (one.position + one.tokens - 1)
        moved = lead != request.lead or one.tokens > 1 or request.in_block
        request.reached, request.rows, request.lead = (one.position, -1), one.tokens, lead
        request.prefilling, request.planned = one.prefill, 0
        request.block = 1 if one.prefill else one.tokens
        if one.prefill:
            self._forget_rows(request, one)
        if request.in_block:
            self._join_rows(request, one)
        return moved and self._set_due(request)

    def _forget_rows(self, request: Request, one: t.Pass) -> None:
        """What was predicted for tokens of the answer that the pass reads once more is not needed any more."""
        read = range(request.stats.prompt_tokens, one.position + one.tokens)
        self._cancel(
            [v for v in self._state.visits if v.request == one.request and v.position in read and v.layer >= 0]
        )

    def read_again(self, request: Request, index: int) -> None:
        """All tokens before number `index` of the answer were read again, and the shadow reads them again, too: what it
        owes of passes before does not come any more."""
        first = request.stats.prompt_tokens
        request.stats.read_again(first, first + index)

    def cut_back(self, request: Request, index: int) -> None:
        """The next pass begins with token `index` of the answer: the rows of the block from there on were wrong, and
        what is predicted for them from now on is about the rows that are read in their place."""
        last = request.stats.prompt_tokens + index - 1
        request.stats.read_again(last + 1, request.position + request.rows)
        request.reached, request.rows = (last, len(self._state.shape.layers) - 1), 1
        request.block = 1
        request.lead = self._state.step.number - last
        if self._set_due(request):
            self._slots.reorder()

    def _set_due(self, request: Request) -> bool:
        """When its visits are expected. Whether there are any."""
        visits = [visit for visit in self._state.visits.values() if visit.request is request]
        for visit in visits:
            visit.due = self._visits.due(request, visit.id)
        return bool(visits)

    def _join_rows(self, request: Request, one: t.Pass) -> None:
        """What was predicted for each row of a block is now needed together."""
        visits = self._state.visits
        for layer in self._state.shape.layers:
            for position in range(one.position, one.position + one.tokens):
                row = visits.get(t.Visit(one.request, position, layer))
                if row is None:
                    continue
                row.forecasts = {position: (*row.demands, *row.unloadable)}
                if position == one.position:
                    continue
                del visits[row.id]
                into = self._visits.open(request, t.Visit(one.request, one.position, layer))
                into.forecasts |= row.forecasts
                into.unloadable += row.unloadable
                for expert, demand in row.demands.items():
                    self._join(into, expert, demand)

    def _spread_rows(self) -> None:
        """The rows of a block were predicted one by one. Where some workers would load more for a layer than others,
        what is queued for it is spread anew."""
        state, live = self._state, len(self._workers.live)
        if not live or state.shortfall is not None or self._workers.homes is not None:
            return
        for layer in state.shape.layers:
            keys = [t.Visit(one.request, one.position, layer) for one in state.step.passes.values()]
            visits = [state.visits[key] for key in keys if key in state.visits]
            places = {demand.expert: demand.worker for visit in visits for demand in visit.demands.values()}
            counts = Counter(places.values())
            if counts and max(counts.values()) > -(-len(places) // live):
                self._slots.spread_anew(visits)

    def _join(self, into: LayerVisit, expert: int, demand: Demand) -> None:
        """One demand for an expert is enough: one that has its expert, if there is any."""
        other = into.demands.get(expert)
        if other is not None and (other.entry is not None or demand.entry is None):
            other.hit &= demand.hit or demand.entry is not other.entry
            self._slots.cancel(demand)
            return
        if other is not None:
            self._slots.cancel(other)
        demand.visit, into.demands[expert] = into, demand

    def _begin_pass(self, request: Request, one: t.Pass) -> None:
        visit = t.Visit(one.request, one.position, self._state.shape.layers[0])
        self._prefetch_forecasts(request, self._strategy.predictor.on_pass_begun(visit, one.tokens, one.prefill))
        if one.prefill and self._plans:
            self._plan(request, one.request, one.position, 0)

    # --- predictions --------------------------------------------------------------------------------------------

    def prefetch(
        self,
        request: Request,
        row: t.Visit,
        experts: tuple[int, ...],
        bring: tuple[int, ...] | None = None,
        importance: LayerImportance | None = None,
    ) -> None:
        """A prediction has come for a row: `experts` are expected, `bring` of them are prefetched; None: all. It
        replaces the prediction that the row had before. One that comes after its gate is late, and only counted."""
        visit = row
        if request.in_block and request.position <= row.position < request.position + request.rows:
            visit = row._replace(position=request.position)
        late = (visit.position, self._visits.ordinal[row.layer]) <= request.reached
        if row.position >= request.stats.prompt_tokens:
            late |= request.prefilling and row.position < request.position + request.rows
            request.stats.add_prediction(row, experts, late)
        request.stats.late += late
        if late:
            return
        opened = self._visits.open(request, visit)
        wanted = experts if bring is None else bring
        expected = self._to_prefetch(opened, row, wanted)
        demands = opened.demands
        if opened.unloadable:
            opened.unloadable = tuple(expert for expert in opened.unloadable if expert in expected)
        for expert in [e for e in demands if e not in expected] if demands else ():
            self._slots.cancel(demands.pop(expert))
        for number, expert in enumerate(expected):
            if expert not in demands and (expert in wanted or expert not in opened.unloadable):
                demand = self._visits.demand(opened, expert, "prediction")
                if importance is not None:
                    demand.importance = importance.importance_of(expert)
                self._slots.place(demand, self._worker_of(opened, number))

    def _to_prefetch(self, opened: LayerVisit, row: t.Visit, bring: tuple[int, ...]) -> tuple[int, ...]:
        """What is prefetched for the visit: in a block for all of its rows."""
        request = opened.request
        if not request.in_block or opened.id.position != request.position:
            return bring
        opened.forecasts[row.position] = bring
        return tuple(dict.fromkeys(itertools.chain.from_iterable(opened.forecasts.values())))

    def _worker_of(self, opened: LayerVisit, number: int) -> int | None:
        """Where the `number`-th expert of a prediction is loaded: in the group of this turn (OD-MoE section 3.1). A
        layer that needs experts for several rows would need too many of a group: then where there is least to load."""
        if len(self._state.step.passes) > 1 or opened.request.in_block:
            return self._workers.spread(opened) if self._workers.live else None
        group = self._workers.group(opened.turn)
        return group[number % len(group)] if group else None

    def _prefetch_forecasts(self, request: Request, forecasts: Iterable[Forecast]) -> None:
        for visit, experts, bring in forecasts:
            self.prefetch(request, visit, experts, bring)

    def on_foreseen(self, request: Request, event: t.Foreseen) -> None:
        """The main model has computed scores that a predictor reads."""
        visit = t.Visit(event.request, event.position, event.layer)
        prefill = request.prefilling and event.position < request.position + request.rows
        resident = self._slots.resident(event.layer).keys()
        top_k = self._state.shape.top_k
        importance = importance_of(event.scores, top_k, prefill) if self._weighs_forms else None
        for forecast in self._strategy.predictor.on_foreseen(visit, event.scores, resident, prefill):
            self.prefetch(request, *forecast, importance if forecast.visit == visit else None)

    # --- workers that were missing ------------------------------------------------------------------------------

    def on_workers_back(self) -> None:
        """They can hold again what must be in slots: what has waited for them gets a worker. Warm-ups that are due
        begin, and prefill assigns as many layers as there are slots for."""
        for demand in self._state.take_waiting():
            self._slots.place(demand)
        for number, request in self._state.requests.items():
            if request.cold:
                self.warm_up(number, request)
        for one in self._state.step.passes.values() if self._plans else ():
            if one.prefill:
                request = self._state.requests[one.request]
                self._plan(request, one.request, one.position, request.reached[1] + 1)

    # --- prefill ------------------------------------------------------------------------------------------------

    def warm_up(self, number: int, request: Request) -> None:
        """Prefill is over: bring in what the residency wants in the slots when decoding begins. While workers are
        missing, nobody knows how many slots there will be: then when they are back."""
        request.cold = self._state.shortfall is not None
        if request.cold:
            return
        visit = t.Visit(number, request.stats.prompt_tokens, -1)
        for expert in self._strategy.residency.warm(self._workers.slots):
            if expert.expert in self._slots.resident(expert.layer):
                continue
            opened = self._visits.open(request, visit)
            demand = Demand(self._commands.next_id(), opened, expert, "warm-up")
            opened.demands[demand.seq] = demand
            self._slots.place(demand, self._workers.share(self._visits.ordinal[expert.layer])[expert.expert])

    def _plan(self, request: Request, number: int, position: int, start: int) -> None:
        """Assign layers from ordinal `start` to the horizon, those that are not assigned yet."""
        layers = self._state.shape.layers
        stop = min(start + self._horizon(), len(layers))
        for ordinal in range(request.planned, stop):
            opened = self._visits.open(request, t.Visit(number, position, layers[ordinal]))
            for expert, worker in enumerate(self._workers.share(ordinal)):
                if expert not in opened.demands:
                    self._slots.place(self._visits.demand(opened, expert, "plan"), worker)
        request.planned = max(request.planned, stop)

    def _horizon(self) -> int:
        """How many layers ahead prefill assigns: enough to fill every slot while one layer computes."""
        return 1 + -(-self._workers.slots // self._state.shape.experts)

    # --- gates --------------------------------------------------------------------------------------------------

    def on_gate_fired(self, event: t.GateFired) -> None:
        """The layer's experts are demanded once the gates of all passes of the step have fired."""
        step, number = self._state.step, event.visit.request
        self._gates.note(event, self._has_predictions)
        if number in step.passes:
            step.gates[number] = event
            self._fire_together()
        else:
            self._fire([event])

    def _fire_together(self) -> None:
        step = self._state.step
        if step.gates and len(step.gates) == len(step.passes):
            events = [step.gates[number] for number in step.passes]
            step.gates.clear()
            self._fire(events)

    def _fire(self, events: list[t.GateFired]) -> None:
        gates, forecasts = self._gates.fire(events)
        for gate in gates:
            visit, request = gate.opened.id, gate.opened.request
            if request.prefilling and self._plans:
                self._plan(request, visit.request, visit.position, self._visits.ordinal[visit.layer] + 1)
            if not gate.rows:
                self.finish(gate.opened)
        for gate, some in zip(gates, forecasts, strict=True):
            self._prefetch_forecasts(gate.opened.request, some)

    def end_step(self) -> None:
        """All requests are about to fail: no gate waits for another."""
        self._state.step.passes.clear()
        self._state.step.gates.clear()

    # --- the end ------------------------------------------------------------------------------------------------

    def on_computed(self, demand: Demand) -> None:
        """All rows of a demand have come back. With the last demand the main model goes on."""
        opened = demand.visit
        if demand.hit:
            opened.request.stats.reuse(opened.request.prefilling)
        elif demand.state == "hosted":
            opened.request.stats.add_hosted(opened.request.prefilling)
        self._slots.on_computed(demand)
        del opened.demands[demand.expert.expert]
        opened.uncomputed -= 1
        if opened.uncomputed == 0:
            self.finish(opened)

    def finish(self, opened: LayerVisit) -> None:
        del self._state.visits[opened.id]
        self._commands.resume(opened.id)

    def close(self, request: int) -> None:
        """Cancel every demand of a request. It leaves the step: the other passes do not wait for its gate."""
        visits, step = self._state.visits, self._state.step
        mine = [visit for visit in visits if visit.request == request]
        under_way = [visit for visit in mine if visits[visit].uncomputed]
        self._cancel(under_way)
        step.gates.pop(request, None)
        if step.passes.pop(request, None) is not None:
            self._fire_together()  # the others may need what was prefetched for it
        self._cancel([visit for visit in mine if visit not in under_way])
        step.absent = len(step.passes) < len(self._state.requests)

    def _cancel(self, visits: list[t.Visit]) -> None:
        for visit in visits:
            for demand in self._state.visits.pop(visit).demands.values():
                self._slots.cancel(demand)
