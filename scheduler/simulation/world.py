"""The nodes of a cluster on a virtual clock: main node, shadow and workers, reduced to how long things take.

What lasts how long, and what waits for what, is as in emulated runs (`scheduler.emulation.clock`): a layer of the main
node from the last answer to the gate; one load at a time on a worker's link, in the order in which they were asked for;
one computation at a time on a worker, in the order in which rows and load were both there; a load that is evicted frees
slot and link at once; messages travel on the main node's shared link (`scheduler.timing.links`). A host place computes
one expert at a time, too, in the order in which rows came. A smaller form loads as much faster as its bytes are fewer.
What the main model computes for a predictor holds up nothing, since it would have to wait: a gate's opinion is there
with the gate that it follows, that of a whole layer (`attention`) a layer's time after the answers of the resident
experts.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from copy import copy
from heapq import heappop, heappush
from typing import Any

from scheduler import types as t
from scheduler.core.machine import Core
from scheduler.simulation.time_breakdown import CallTimes, LoadTimes, TimeBreakdown
from scheduler.simulation.workload import Rows, Workload
from scheduler.timing.links import MainLinks
from scheduler.timing.profile import Profile
from scheduler.trace import Span

REQUEST = 1
LOOKAHEAD = 2
"""Passes that a shadow may run ahead of the main model where no alignment is due, as the engine tells it."""

_ONE_EACH = itertools.repeat(1)


class _Worker:
    """`tickets`: of each slot, its load; `since`: when each slot's last computed expert had left it. `lasts`: seconds
    of a computation of so many rows."""

    __slots__ = ("free", "lasts", "queue", "running", "since", "tickets")

    def __init__(self, tickets: list[LoadTimes | None], lasts: Callable[[int], float]) -> None:
        self.tickets = tickets
        self.since = [0.0] * len(tickets)
        self.lasts = lasts
        self.queue: deque[LoadTimes] = deque()
        self.running: LoadTimes | None = None
        self.free = 0.0


def _lying() -> LoadTimes:
    """Stands for whatever a host place computes: it is where it lies, as after a load before the beginning."""
    return LoadTimes(t.Load(-1, 0, t.ExpertId(-1, -1), -1), 0.0, 0.0, [], begun=0.0, ended=0.0)


class World:
    """One request, answered. `tokens`: of the answer; `done`: when each of them existed, the prefill's first."""

    def __init__(
        self,
        core: Core,
        profile: Profile,
        links: MainLinks,
        workload: Workload,
        prompt_tokens: int,
        tokens: int,
        waits: TimeBreakdown,
        spans: list[Span] | None = None,
    ) -> None:
        self.core = core
        self.profile = profile
        self.done: list[float] = []
        self.spans = spans
        self._links = links
        self._workload = workload
        self._prompt_tokens = prompt_tokens
        self._tokens = tokens
        self._waits = waits
        self._heap: list[tuple[float, int, Callable[[Any], object], Any]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._workers: list[_Worker] = []
        self._calls: dict[int, CallTimes] = {}
        self._cause: CallTimes | None = None
        self._gate = self._from = self._pass_began = 0.0
        self._main_s = 0.0
        self._load_s = profile.load_s
        self._foresees = core.strategy.predictor.foresight is not None
        self._attends = core.strategy.predictor.foresight == "attention"
        self._scored = self._foresees or core.strategy.wants_scores
        self._resident: tuple[int, ...] = ()
        self._owing: set[int] = set()
        self._foreseen: list[t.Foreseen] = []
        self._shadow_step = -1  # -1: it has not read the prompt yet
        self._shadow_busy = True
        self._shadow_idle = 0.0
        self._announced = -1
        self._acts: dict[type, Callable[[Any], None]] = {
            t.Load: self._load, t.Evict: self._evict, t.Compute: self._compute, t.Resume: self._resume,
            t.Follow: self._follow, t.Align: self._align, t.Unfollow: self._nothing, t.Fail: self._nothing,
            t.Route: self._route,
        }  # fmt: skip

    def start(self, workers: int, slots: int, shadow: bool, host: bool = False) -> None:
        """Everyone joins, and the request is opened. `host`: a host place is there, too. Raises ConfigError where the
        profile has no times for it."""
        p = self.profile
        for number in range(workers):
            self._workers.append(_Worker([None] * slots, p.compute_s))
            self._post(t.WorkerJoined(number, slots, p.load_s, *p.device_costs))
        if host:
            costs = p.host_costs
            self._workers.append(_Worker([_lying()], p.host_compute_s))
            self._post(t.WorkerJoined(workers, 0, 0.0, *costs))
        if shadow:
            self._post(t.ShadowJoined())
        self._post(t.RequestOpened(REQUEST, self._prompt_tokens))
        self._begin_pass(0, self._prompt_tokens)

    def run(self, until: int) -> bool:
        """Go on until so many tokens of the answer are there; False where nothing happens any more before that."""
        heap, done = self._heap, self.done
        while heap and len(done) < until:
            self._now, _, act, what = heappop(heap)
            act(what)
        return len(done) >= until

    @property
    def events(self) -> int:
        """How many have been put on the heap so far."""
        return next(copy(self._order))

    def drain(self) -> None:
        """The answer is complete: hear the predictions that are still on their way."""
        stats = self.core.stats[REQUEST]
        while self._heap and stats.unmatched:
            self._now, _, act, what = heappop(self._heap)
            act(what)

    def _at(self, when: float, act: Callable[[Any], object], what: Any) -> None:
        heappush(self._heap, (when, next(self._order), act, what))

    def _post(self, event: t.Event) -> list[t.Command]:
        acts, commands = self._acts, self.core.handle(event, self._now)
        for command in commands:
            acts[type(command)](command)
        return commands

    def _span(self, row: str, what: str, label: str, start: float, end: float) -> None:
        if self.spans is not None:
            self.spans.append(Span(row, what, label, start, end))

    def _nothing(self, command: t.Command) -> None:
        pass

    # --- the main node ------------------------------------------------------------------------------------------

    def _begin_pass(self, position: int, tokens: int) -> None:
        self._pass_began = self._from = self._now
        self._main_s = self.profile.main_s(tokens)
        self._post(t.PassStarted(REQUEST, position, tokens, prefill=position == 0))
        self._begin_layer(t.Visit(REQUEST, position, 0))

    def _begin_layer(self, visit: t.Visit) -> None:
        self._from = now = self._now
        heappush(self._heap, (now + self._main_s, next(self._order), self._fire, visit))

    def _fire(self, visit: t.Visit) -> None:
        self._gate = self._now
        if self.spans is not None:
            self._span("main", "layer", str(visit.layer), self._from, self._now)
        rows: tuple[tuple[int, int], ...]
        if visit.position:
            routes = self._workload.routes(visit.position - self._prompt_tokens, visit.layer)
            rows = tuple(zip(sorted(routes), _ONE_EACH, strict=False))
        else:
            rows = self._workload.prompt(visit.layer)
        if self._scored:
            self._fire_scored(visit, rows)
        else:
            self._post(t.GateFired(visit, rows))

    def _fire_scored(self, visit: t.Visit, rows: Rows) -> None:
        """Somebody reads scores, or what the main model then foresees."""
        index = visit.position - self._prompt_tokens if visit.position else -1
        gate = self._workload.gate(index, visit.layer)
        self._resident, self._owing = (), set()
        self._foreseen = [
            t.Foreseen(REQUEST, self._prompt_tokens + at if at >= 0 else 0, layer, scores)
            for at, layer, scores in (gate.foreseen if self._foresees else ())
        ]
        commands = self._post(t.GateFired(visit, rows, gate.chosen, gate.scores))
        if self._attends:
            self._owing = {c.call_id for c in commands if isinstance(c, t.Compute) and c.expert[1] in self._resident}
        if not self._owing:
            self._foresee()

    def _route(self, command: t.Route) -> None:
        self._resident = command.resident

    def _foresee(self) -> None:
        """What it is computed from is there."""
        for fact in self._foreseen:
            if self._attends:
                self._at(self._now + self._main_s, self._post, fact)
            else:
                self._post(fact)

    def _resume(self, command: t.Resume) -> None:
        visit = command.visit
        if visit.position:
            self._waits.layer(self._from, self._gate, self._cause, self._now)
        if self.spans is not None:
            self._span("main", "wait", str(visit.layer), self._gate, self._now)
        if visit.layer + 1 < self.profile.layers:
            self._begin_layer(t.Visit(REQUEST, visit.position, visit.layer + 1))
            return
        self._span("main", "token", f"{REQUEST}.{visit.position}", self._pass_began, self._now)
        index = len(self.done)
        self.done.append(self._now)
        if index + 1 < self._tokens:
            self._at(self._now, self._decode, index)

    def _decode(self, index: int) -> None:
        """Token `index` exists: the pass that reads it begins."""
        self._post(t.TokenDecoded(REQUEST, index))
        self._begin_pass(self._prompt_tokens + index, 1)

    # --- a worker's loads ---------------------------------------------------------------------------------------

    def _load(self, command: t.Load) -> None:
        worker = self._workers[command.worker]
        slot = command.slot
        worker.tickets[slot] = ticket = LoadTimes(command, self._now, worker.since[slot], [])
        if command.form:
            ticket.share = self.profile.form_share(command.form)
        if worker.running is None:
            self._begin_load(worker, ticket)
        else:
            worker.queue.append(ticket)

    def _begin_load(self, worker: _Worker, ticket: LoadTimes) -> None:
        worker.running = ticket
        ticket.begun = now = self._now
        heappush(self._heap, (now + self._load_s * ticket.share, next(self._order), self._loaded, ticket))

    def _next_load(self, worker: _Worker) -> None:
        worker.running = None
        while worker.queue:
            ticket = worker.queue.popleft()
            if not ticket.given_up:
                self._begin_load(worker, ticket)
                return

    def _loaded(self, ticket: LoadTimes) -> None:
        if ticket.given_up:
            return
        ticket.ended = now = self._now
        worker = self._workers[ticket.command.worker]
        self._next_load(worker)
        if self.spans is not None:
            self._tell_load(ticket)
        self._post(t.LoadEnded(ticket.command.load_id))
        if ticket.waiting:
            for call in ticket.waiting:
                self._begin_compute(worker, call, now)
            ticket.waiting.clear()  # they know the ticket: a circle that only the collector would find

    def _tell_load(self, ticket: LoadTimes) -> None:
        self._span(f"worker {ticket.command.worker}", "load", _label(ticket.command), ticket.begun, self._now)
        waited = max([call.arrives for call in ticket.waiting], default=self._now)
        if waited < self._now:
            self._span("main", "stall", "", self._gate, self._now)

    def _evict(self, command: t.Evict) -> None:
        worker = self._workers[command.worker]
        ticket, worker.tickets[command.slot] = worker.tickets[command.slot], None
        if ticket is None:
            return
        ticket.given_up = True
        if self.spans is not None:
            row = f"worker {command.worker}"
            if worker.running is ticket:
                self._span(row, "given up", _label(command), ticket.begun, self._now)
            self._span(row, "evict", _label(command), self._now, self._now)
        if worker.running is ticket:
            self._next_load(worker)

    # --- a worker's computations --------------------------------------------------------------------------------

    def _compute(self, command: t.Compute) -> None:
        worker = self._workers[command.worker]
        ticket = worker.tickets[command.slot]
        if ticket is None:
            return
        rows = command.stop - command.start
        arrives = self._links.sent(self._now, rows)
        call = CallTimes(command, ticket, rows, self._now, arrives, self._cause)
        if ticket is worker.running and ticket.begun + self._load_s * ticket.share >= arrives:
            ticket.waiting.append(call)
        elif ticket.ended >= 0 and len(worker.tickets) == 1:  # nothing else could come between
            self._begin_compute(worker, call, arrives)
        else:
            self._at(arrives, self._arrived, call)

    def _arrived(self, call: CallTimes) -> None:
        if call.ticket.ended < 0:
            call.ticket.waiting.append(call)
        else:
            self._begin_compute(self._workers[call.command.worker], call, self._now)

    def _begin_compute(self, worker: _Worker, call: CallTimes, at: float) -> None:
        call.start = start = at if at > worker.free else worker.free
        call.end = worker.free = end = start + worker.lasts(call.rows)
        heappush(self._heap, (end, next(self._order), self._computed, call))

    def _computed(self, call: CallTimes) -> None:
        command = call.command
        if call.ticket.given_up:
            return
        if command.evict:
            self._workers[command.worker].tickets[command.slot] = None
        comes = self._links.answered(self._now, call.rows)
        if self.spans is not None:
            row, label, number = f"worker {command.worker}", _label(command), command.call_id
            self._span(row, "transfer", f"{label} to #{number}", call.sent, call.arrives)
            self._span(row, "compute", label, call.start, call.end)
            if command.evict:
                self._span(row, "evict", label, self._now, self._now)
            self._span(row, "transfer", f"from #{number}", self._now, comes)
        heappush(self._heap, (comes, next(self._order), self._answered, call))

    def _answered(self, call: CallTimes) -> None:
        command = call.command
        if command.evict:
            self._workers[command.worker].since[command.slot] = self._now
        if self._owing:
            self._owing.discard(command.call_id)
            if not self._owing:
                self._foresee()
        self._cause = call
        self._post(t.ComputeEnded(command.call_id))
        self._cause = None

    # --- the shadow ---------------------------------------------------------------------------------------------

    def _follow(self, command: t.Follow) -> None:
        """It reads the prompt beside the main node, and predicts nothing for it."""
        self._shadow_busy = True
        self._at(self._now + self.profile.layers * self.profile.shadow_layer_s, self._shadow_done, -1)
        self._tell_shadow()

    def _align(self, command: t.Align) -> None:
        rows = (command.kv_stop - command.kv_start) * self.profile.layers
        arrives = self._links.aligned(self._now, rows)
        if self.spans is not None:
            label = f"align {REQUEST}.{command.step} {command.kv_start}"
            self._span("shadow", "transfer", label, self._now, arrives)
        self._at(arrives, self._aligned, command.step)

    def _aligned(self, step: int) -> None:
        self._announced = max(self._announced, step)
        self._shadow_go()

    def _shadow_go(self) -> None:
        step = self._shadow_step
        ahead = 0 if self.core.alignment.due(step) else LOOKAHEAD
        if self._shadow_busy or step > self._announced + ahead or step >= self._tokens - 1:
            return
        self._shadow_busy = True
        if self._now > self._shadow_idle:
            self._span("shadow", "late", str(step), self._shadow_idle, self._now)
        self._tell_shadow()
        position = self._prompt_tokens + step
        layer_s, end = self.profile.shadow_layer_s, self._now
        for layer in range(self.profile.layers):
            end += layer_s
            experts = self._workload.predict(step, layer)
            if experts is not None:
                came = self._links.predicted(end)
                self._at(came, self._post, t.Predicted(REQUEST, position, layer, experts))
                if self.spans is not None:
                    self._span("shadow", "transfer", f"prediction {layer} {REQUEST}.{position}", end, came)
        self._at(end, self._shadow_done, step)

    def _tell_shadow(self) -> None:
        if self.spans is not None:
            for layer in range(self.profile.layers):
                begun = self._now + layer * self.profile.shadow_layer_s
                self._span("shadow", "shadow", str(layer), begun, begun + self.profile.shadow_layer_s)

    def _shadow_done(self, step: int) -> None:
        self._shadow_busy, self._shadow_idle = False, self._now
        self._shadow_step = step + 1
        self._shadow_go()


def _label(command: t.Load | t.Evict | t.Compute) -> str:
    return f"{command.expert.layer}.{command.expert.expert}"
