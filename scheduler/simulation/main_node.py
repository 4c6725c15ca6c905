"""The main node on a virtual clock: one serial resource that computes the layers of a step's passes.

Each request has a forward of its own: a layer of a pass may begin when its layer before was resumed, and of several the
one that was resumed first does. Or the dense part is batched: a layer begins for all passes when the layer before was
resumed for all, and lasts as long as for all their rows together. A step of a single pass is both.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from scheduler import types as t
from scheduler.simulation.events import EventHeap
from scheduler.simulation.foresight import SimulatedForesight
from scheduler.simulation.requests import StepPass
from scheduler.simulation.scenario import Scenario
from scheduler.simulation.time_breakdown import CallTimes, TimeBreakdown
from scheduler.trace import Span


class SimulatedMain:
    """Runs one step at a time. `post`: passes an event to the core and carries out its commands. `ended`: called as
    passes end, with those that end together, and whether the step ends with them."""

    def __init__(
        self,
        events: EventHeap,
        scenario: Scenario,
        post: Callable[[t.Event], object],
        foresight: SimulatedForesight | None,
        breakdown: TimeBreakdown,
        ended: Callable[[list[StepPass], bool], None],
        spans: list[Span] | None,
    ) -> None:
        """`foresight`: takes gates with scores, if a policy reads them."""
        self.idle_from: float | None = None
        """Since when it waits for a layer's experts. None: it computes, or has no step."""
        self.cause: CallTimes | None = None
        """The computation whose answer is being handled."""
        self.steps = 0
        """Steps begun so far."""
        self._events = events
        self._profile = scenario.profile
        self._post = post
        self._foresight = foresight
        self._breakdown = breakdown
        self._batched = scenario.batch_dense
        self._prompt_s = scenario.prompt_s
        self._ended = ended
        self._spans = spans
        self._passes: list[StepPass] = []
        self._running: dict[int, StepPass] = {}  # by request
        self._together = True
        self._main_s = 0.0  # of a layer, if passes run together
        self._unresumed = 0  # visits of the layer under way, if passes run together
        self._begun = self._layer_start = 0.0
        self._ready: list[tuple[float, int, int, CallTimes | None]] = []  # since when, order, layer, why only then
        self._choosing = False
        self._decoding = False
        self._union = self._union_layers = 0  # of steps that only decode: different experts, layers
        self._counted = False  # this is one
        self._chosen: list[set[int]] = []  # by layer, the experts of several passes

    @property
    def union_size(self) -> float | None:
        """Different experts that the rows of a step need in a layer, the mean of all steps that only decode."""
        return self._union / self._union_layers if self._union_layers else None

    def begin(self, passes: list[StepPass]) -> None:
        """Begin a step."""
        profile = self._profile
        self._passes = passes
        self._running = {one.request.number: one for one in passes}
        self._together = self._batched or len(passes) == 1
        self._begun = self._events.now
        self._decoding = not all(one.prefill for one in passes)
        self._counted = not any(one.prefill for one in passes)
        self._chosen = [set() for _ in range(profile.layers)] if self._counted and len(passes) > 1 else []
        self._main_s = profile.main_s(sum(one.tokens for one in passes))
        for one in passes:
            one.main_s = self._main_s if self._together else profile.main_s(one.tokens)
        self.steps += 1
        skipped = self._prompt_s is not None and not self._decoding
        announced = [one.as_pass._replace(prefill=False) if skipped else one.as_pass for one in passes]
        self._post(t.StepStarted(tuple(announced)))
        if self._prompt_s is not None and skipped:
            self._events.at(self._begun + self._prompt_s, self._end_passes, passes)
            return
        if self._together:
            self._begin_together(0)
        else:
            self._ready = [(self._begun, one.order, 0, None) for one in passes]
            heapify(self._ready)
            self._choose()

    def resume(self, command: t.Resume) -> None:
        visit, now = command.visit, self._events.now
        last = visit.layer + 1 == self._profile.layers
        if self._together:
            self._unresumed -= 1
            if self._unresumed == 0:
                self._end_wait(visit.layer, self.cause)
                if last:
                    self._end_passes(self._passes)
                else:
                    self._begin_together(visit.layer + 1)
            return
        one = self._running[visit.request]
        if last:
            if len(self._running) == 1:
                self._end_wait(visit.layer, self.cause)
            self._end_passes([one])
            return
        heappush(self._ready, (now, one.order, visit.layer + 1, self.cause))
        if self.idle_from is not None and not self._choosing:
            # Others that are resumed at this very moment take part in the choice.
            self._choosing = True
            self._events.at(now, self._choose, None)

    # --- layers -------------------------------------------------------------------------------------------------

    def _begin_together(self, layer: int) -> None:
        self._layer_start = now = self._events.now
        self._events.at(now + self._main_s, self._fire_together, layer)

    def _fire_together(self, layer: int) -> None:
        self._unresumed = len(self._passes)
        self._end_layer(layer)
        for one in self._passes:
            self._fire(one, layer)

    def _choose(self, _: object = None) -> None:
        """Begin the layer that has been ready for longest."""
        self._choosing = False
        _, order, layer, cause = heappop(self._ready)
        one = self._passes[order]
        if self.idle_from != self._events.now:
            self._end_wait(layer - 1, cause)
        self.idle_from = None
        self._layer_start = now = self._events.now
        self._events.at(now + one.main_s, self._fire_own, (one, layer))

    def _fire_own(self, gate: tuple[StepPass, int]) -> None:
        one, layer = gate
        self._end_layer(layer)
        self._fire(one, layer)
        if self._ready and not self._choosing:
            self._choose()

    def _end_layer(self, layer: int) -> None:
        self.idle_from = now = self._events.now
        if self._decoding:
            self._breakdown.add_compute(now - self._layer_start)
        if self._spans is not None:
            self._spans.append(Span("main", "layer", str(layer), self._layer_start, now))

    def _end_wait(self, layer: int, cause: CallTimes | None) -> None:
        """It goes on after its wait for a layer, which the answer of `cause` has ended."""
        since, now = self.idle_from, self._events.now
        self.idle_from = None
        if since is None:
            return
        if self._decoding:
            self._breakdown.add_wait(since, cause, now)
        if self._spans is not None:
            self._spans.append(Span("main", "wait", str(layer), since, now))

    def _fire(self, one: StepPass, layer: int) -> None:
        """Post a pass's gate, with its scores and what the main model foresees if a policy reads them."""
        visit = t.Visit(one.request.number, one.position, layer)
        rows, chosen = one.rows(layer)
        if self._chosen:
            self._chosen[layer].update([expert for expert, _ in rows])
        elif self._counted:
            self._union += len(rows)
            self._union_layers += 1
        if self._foresight is None:
            self._post(t.GateFired(visit, rows, chosen))
            return
        arrival = one.request.arrival
        gate = arrival.workload.gate(one.index, layer)
        foreseen = [
            t.Foreseen(visit.request, arrival.prompt_tokens + at if at >= 0 else one.position, ahead, scores)
            for at, ahead, scores in gate.foreseen
        ]
        self._foresight.fire(t.GateFired(visit, rows, gate.chosen, gate.scores), foreseen, one.main_s)

    # --- ends ---------------------------------------------------------------------------------------------------

    def _end_passes(self, passes: list[StepPass]) -> None:
        for one in passes:
            del self._running[one.request.number]
            if self._spans is not None:
                label = f"{one.request.number}.{one.position}"
                self._spans.append(Span("main", "token", label, self._begun, self._events.now))
        over = not self._running
        if over:
            self._union += sum(map(len, self._chosen))
            self._union_layers += len(self._chosen)
            self._breakdown.steps += self._decoding
        self._ended(passes, over)
