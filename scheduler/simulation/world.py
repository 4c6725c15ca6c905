"""The nodes of a cluster on a virtual clock: main node, shadow and workers, reduced to how long their work takes.

Durations and waits are those of emulated runs (`scheduler.emulation.clock`). Messages travel on the main node's shared
link (`scheduler.timing.links`). A step begins when the one before has ended, with a pass of every request that is open
then; a request that arrives meanwhile joins the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from scheduler import types as t
from scheduler.core.machine import Core
from scheduler.drafts.length import DraftLengths
from scheduler.errors import SimulationError
from scheduler.simulation.bounds import AccessLog
from scheduler.simulation.drafts import RequestDrafts
from scheduler.simulation.events import EventHeap
from scheduler.simulation.foresight import SimulatedForesight
from scheduler.simulation.main_node import SimulatedMain
from scheduler.simulation.requests import Arrival, RequestQueue, SimulatedRequest, StepPass
from scheduler.simulation.scenario import Scenario
from scheduler.simulation.shadow import Draft, SimulatedShadow
from scheduler.simulation.time_breakdown import CallTimes, TimeBreakdown
from scheduler.simulation.workers import SimulatedWorkers
from scheduler.timing.links import MainLinks
from scheduler.trace import Span

LAST_PREDICTIONS_S = 10.0
"""Longest wait for a request's last predictions before it is closed, as in the main node."""


class World:
    """A core, its nodes and the requests that they answer. `spans`: gets every node's spans; None: nobody reads them.
    `lengths`: of drafts, as earlier requests have left them; None: new ones. `log`: gets the gates. Raises ConfigError
    if the profile has no times for a host place that the scenario has."""

    def __init__(
        self,
        core: Core,
        scenario: Scenario,
        arrivals: Sequence[Arrival],
        spans: list[Span] | None = None,
        lengths: DraftLengths | None = None,
        log: AccessLog | None = None,
    ) -> None:
        profile, system = scenario.profile, scenario.system
        self.core = core
        self.events = EventHeap()
        self.queue = RequestQueue(arrivals, scenario.parallel, scenario.prefill_chunk, scenario.block)
        self.breakdown = TimeBreakdown(system.predictor != "none")
        self.tokens = 0
        """Of all answers so far."""
        self._log = log
        self._until = 0  # tokens of all answers, when `run` returns
        self._scenario = scenario
        self._links = MainLinks(profile, duplex=system.prefill == "ahead")
        self._shadow = SimulatedShadow(self.events, scenario, self._links, self._on_predicted, self._on_drafted, spans)
        self._lengths = lengths or scenario.draft_lengths()
        self._passes: list[StepPass] = []  # of the step under way
        self._begun = 0.0  # when it began
        self._leaving: set[SimulatedRequest] = set()  # complete, but for predictions on their way
        self._idle = False  # the main node has no step
        self._routed = False  # there is a Route among the commands of this event
        foresight = core.strategy.predictor.foresight
        self._foresight = SimulatedForesight(foresight, self.events, self._post)
        self._workers = SimulatedWorkers(
            self.events, profile, self._links, self._post, self._on_answered, lambda: self.main.idle_from, spans
        )
        self.main = SimulatedMain(
            self.events,
            scenario,
            self._post,
            self._foresight if foresight is not None or core.strategy.wants_scores else None,
            self.breakdown,
            self._passes_ended,
            spans,
        )
        self._handlers: dict[type, Callable[[Any], None]] = {
            t.Load: self._workers.load,
            t.Evict: self._workers.evict,
            t.Compute: self._workers.compute,
            t.Resume: self.main.resume,
            t.Follow: self._shadow.follow,
            t.Align: self._shadow.align,
            t.Unfollow: self._shadow.unfollow,
            t.Fail: self._fail,
            t.Route: self._route,
        }

    def start(self) -> None:
        """All nodes join, and the first requests are opened."""
        scenario = self._scenario
        for number, held in enumerate(scenario.parts()):
            costs, slots, own = scenario.costs_of(number), scenario.slots_of(number), scenario.profile_of(number)
            host_slots = scenario.host_slots_of(number)
            self._workers.join(slots, costs, scenario.largest_form(costs), own, held, host_slots)
        if scenario.host:
            self._workers.join_host()
        if scenario.system.predictor == "sep":
            self._post(t.ShadowJoined())
        self._begin_step()
        for at in sorted({request.arrival.at for request in self.queue.requests if request.arrival.at > 0}):
            self.events.at(at, self._arrive, None)

    def run(self, until: int) -> bool:
        """Run until all answers together have `until` tokens. Returns False if no event is left before that."""
        self._until = until
        self.events.run()
        return self.tokens >= until

    def drain(self) -> None:
        """The answers are complete: receive the predictions in flight."""
        while any(stats.unmatched_count for stats in self.core.stats.values()) and self.events.step():
            pass

    def _post(self, event: t.Event) -> None:
        if self._log is not None and isinstance(event, t.GateFired):
            prompt_tokens = self.queue.requests[event.visit.request - 1].arrival.prompt_tokens
            self._log.add(event.visit, [expert for expert, _ in event.rows], event.visit.position >= prompt_tokens)
        handlers, commands = self._handlers, self.core.handle(event, self.events.now)
        for command in commands:
            handlers[type(command)](command)
        if self._routed:
            self._routed = False
            self._foresight.on_decided(commands)

    def _route(self, command: t.Route) -> None:
        self._routed = True

    def _fail(self, command: t.Fail) -> None:
        raise SimulationError(f"a request fails: {command.reason}")

    def _on_answered(self, call: CallTimes | None) -> None:
        self.main.cause = call
        if call is not None:
            self._foresight.on_answered(call.command.call_id)

    def _on_predicted(self, event: t.Predicted) -> None:
        self._post(event)
        if self._leaving:
            for request in [one for one in self._leaving if not self.core.stats[one.number].unmatched_count]:
                self._close(request)

    def _on_drafted(self, draft: Draft) -> None:
        drafts = self.queue.requests[draft.request - 1].drafts
        if drafts is not None:
            drafts.offer(draft.step, draft.token, draft.path)

    # --- requests and steps -------------------------------------------------------------------------------------

    def _arrive(self, _: None = None) -> None:
        """A request has arrived, or there is room for one."""
        if self._idle:
            self._begin_step()
        else:
            self._admit()

    def _admit(self) -> None:
        for request in self.queue.admit(self.events.now, self.main.steps):
            arrival = request.arrival
            if self._scenario.draft:
                request.drafts = RequestDrafts(self._lengths)
            self._shadow.add_request(request.number, arrival.workload, arrival.prompt_tokens, arrival.tokens)
            self._post(t.RequestOpened(request.number, arrival.prompt_tokens))

    def _begin_step(self) -> None:
        self._admit()
        passes = self.queue.passes()
        self._idle = not passes
        self._passes, self._begun = passes, self.events.now
        if passes:
            self.main.begin(passes)

    def _passes_ended(self, passes: list[StepPass], over: bool) -> None:
        """`over`: the step has ended with them."""
        now = self.events.now
        decoded = [one.request for one in passes if self._advance(one, now)]
        if over:
            rows = sum(one.tokens for one in self._passes)
            plans = [one.request.drafts.plan for one in self._passes if one.request.drafts is not None]
            self._lengths.on_step_ended(plans, rows, now - self._begun, not any(one.prefill for one in self._passes))
        if self.tokens >= self._until:
            self.events.stop()
        if self.queue.has_unfinished:
            self.events.at(now, self._go_on, (decoded, over))

    def _advance(self, one: StepPass, now: float) -> int:
        gained = one.advance(now)
        self.tokens += gained
        return gained

    def _go_on(self, ended: tuple[list[SimulatedRequest], bool]) -> None:
        """Requests have got tokens, and the step has ended, or has not."""
        decoded, over = ended
        for request in decoded:
            if not request.complete:
                mine, index = request.drafts, len(request.done) - 1
                said = (mine.draft_count(), mine.foretold) if mine is not None else ()
                self._post(t.TokenDecoded(request.number, index, *said))
                request.choose_block()
            elif self.core.stats[request.number].unmatched_count:
                self._leaving.add(request)
                self.events.at(self.events.now + LAST_PREDICTIONS_S, self._close, request)
            else:
                self._close(request)
        if over:
            self._begin_step()

    def _close(self, request: SimulatedRequest) -> None:
        """Its predictions have come, or do not come in time. One that waits takes its place."""
        self._leaving.discard(request)
        if self.queue.close(request):
            self._post(t.RequestClosed(request.number, len(request.done)))
            self._arrive()
