"""The nodes of a cluster on a virtual clock: main node, shadow and workers, reduced to how long their work takes.

Durations and waits are those of emulated runs (`scheduler.emulation.clock`). A layer of the main node lasts from the
last answer to the gate. A worker's link carries one load at a time, in the order of the commands; a worker computes one
expert at a time, in the order in which both rows and load were there. An evicted load frees its link at the end of the
piece under way (`Profile.ended_load_s`).
Messages travel on the main node's shared link (`scheduler.timing.links`). A host place computes one expert at a time
too, in the order in which rows arrive. A smaller form loads as much faster as its bytes are fewer.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from scheduler import types as t
from scheduler.core.machine import Core
from scheduler.simulation.events import EventHeap
from scheduler.simulation.foresight import SimulatedForesight
from scheduler.simulation.shadow import SimulatedShadow
from scheduler.simulation.time_breakdown import CallTimes, LoadTimes, TimeBreakdown
from scheduler.simulation.workload import Rows, Workload
from scheduler.timing.links import MainLinks
from scheduler.timing.profile import Profile
from scheduler.trace import Span

REQUEST = 1

_ONE_EACH = itertools.repeat(1)


class _Worker:
    """A worker or a host place."""

    __slots__ = ("compute_s", "free", "freed", "loading", "queue", "slots")

    def __init__(self, slots: list[LoadTimes | None], compute_s: Callable[[int], float]) -> None:
        self.slots = slots
        """The load of each slot, in flight or over."""
        self.freed = [0.0] * len(slots)
        """The time at which the last computed expert left each slot."""
        self.compute_s = compute_s
        """Seconds of a computation, by its number of rows."""
        self.queue: deque[LoadTimes] = deque()
        self.loading: LoadTimes | None = None
        self.free = 0.0
        """End of its last computation."""


def _host_load() -> LoadTimes:
    """Stands for all experts of a host place: a load that ended before the simulation began."""
    return LoadTimes(t.Load(-1, 0, t.ExpertId(-1, -1), -1), 0.0, 0.0, [], begun=0.0, ended=0.0)


class World:
    """One request and its answer of `tokens` tokens."""

    def __init__(
        self,
        core: Core,
        profile: Profile,
        links: MainLinks,
        workload: Workload,
        prompt_tokens: int,
        tokens: int,
        breakdown: TimeBreakdown,
        spans: list[Span] | None = None,
    ) -> None:
        self.core = core
        self.profile = profile
        self.spans = spans
        self.done: list[float] = []
        """The time of each token of the answer, beginning with the one that prefill gives."""
        self.events = EventHeap()
        self._until = 0  # tokens of the answer, when `run` returns
        self._links = links
        self._workload = workload
        self._prompt_tokens = prompt_tokens
        self._tokens = tokens
        self._breakdown = breakdown
        self._shadow = SimulatedShadow(
            self.events, profile, links, workload, core.alignment, REQUEST, prompt_tokens, tokens, self._post, spans
        )
        foresight = core.strategy.predictor.foresight
        self._foresight = SimulatedForesight(foresight, self.events, self._post)
        self._scored = foresight is not None or core.strategy.wants_scores
        self._workers: list[_Worker] = []
        self._load_s = profile.load_s
        # The main node's current pass and layer.
        self._main_s = self._pass_start = self._layer_start = self._gate = 0.0
        self._cause: CallTimes | None = None  # the computation whose answer is being handled
        self._handlers: dict[type, Callable[[Any], None]] = {
            t.Load: self._load,
            t.Evict: self._evict,
            t.Compute: self._compute,
            t.Resume: self._resume,
            t.Follow: self._shadow.follow,
            t.Align: self._shadow.align,
            t.Unfollow: self._ignore,
            t.Fail: self._ignore,
            t.Route: self._foresight.route,
        }

    def start(
        self,
        workers: int,
        slots: int,
        shadow: bool,
        host: bool = False,
        form_costs: Mapping[int, tuple[t.FormCost, ...]] | None = None,
    ) -> None:
        """All nodes join, and the request is opened. `host`: with a host place. `form_costs`: by worker.

        Raises ConfigError where the profile has no times for a host place.
        """
        profile = self.profile
        for number in range(workers):
            self._workers.append(_Worker([None] * slots, profile.compute_s))
            forms = (form_costs or {}).get(number, ())
            self._post(t.WorkerJoined(number, slots, profile.load_s, *profile.device_costs, forms))
        if host:
            self._workers.append(_Worker([_host_load()], profile.host_compute_s))
            self._post(t.WorkerJoined(workers, 0, 0.0, *profile.host_costs))
        if shadow:
            self._post(t.ShadowJoined())
        self._post(t.RequestOpened(REQUEST, self._prompt_tokens))
        self._begin_pass(0, self._prompt_tokens)

    def run(self, until: int) -> bool:
        """Run until the answer has `until` tokens. Returns False if no event is left before that."""
        self._until = until
        self.events.run()
        return len(self.done) >= until

    def drain(self) -> None:
        """The answer is complete: receive the predictions in flight."""
        stats = self.core.stats[REQUEST]
        while stats.unmatched and self.events.step():
            pass

    def _post(self, event: t.Event) -> list[t.Command]:
        handlers, commands = self._handlers, self.core.handle(event, self.events.now)
        for command in commands:
            handlers[type(command)](command)
        return commands

    def _ignore(self, command: t.Command) -> None:
        pass

    def _span(self, row: str, what: str, label: str, start: float, end: float) -> None:
        if self.spans is not None:
            self.spans.append(Span(row, what, label, start, end))

    # --- the main node ------------------------------------------------------------------------------------------

    def _begin_pass(self, position: int, tokens: int) -> None:
        self._pass_start = self.events.now
        self._main_s = self.profile.main_s(tokens)
        self._post(t.StepStarted((t.Pass(REQUEST, position, tokens, prefill=position == 0),)))
        self._begin_layer(t.Visit(REQUEST, position, 0))

    def _begin_layer(self, visit: t.Visit) -> None:
        self._layer_start = now = self.events.now
        self.events.at(now + self._main_s, self._fire, visit)

    def _fire(self, visit: t.Visit) -> None:
        self._gate = self.events.now
        if self.spans is not None:
            self._span("main", "layer", str(visit.layer), self._layer_start, self._gate)
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
        """Post the gate with its scores, and then what the main model foresees."""
        index = visit.position - self._prompt_tokens if visit.position else -1
        gate = self._workload.gate(index, visit.layer)
        foreseen = [
            t.Foreseen(REQUEST, self._prompt_tokens + at if at >= 0 else 0, layer, scores)
            for at, layer, scores in gate.foreseen
        ]
        self._foresight.fire(t.GateFired(visit, rows, gate.chosen, gate.scores), foreseen, self._main_s)

    def _resume(self, command: t.Resume) -> None:
        visit, now = command.visit, self.events.now
        if visit.position:
            self._breakdown.layer(self._layer_start, self._gate, self._cause, now)
        if self.spans is not None:
            self._span("main", "wait", str(visit.layer), self._gate, now)
        if visit.layer + 1 < self.profile.layers:
            self._begin_layer(t.Visit(REQUEST, visit.position, visit.layer + 1))
            return
        self._span("main", "token", f"{REQUEST}.{visit.position}", self._pass_start, now)
        index = len(self.done)
        self.done.append(now)
        if len(self.done) >= self._until:
            self.events.stop()
        if index + 1 < self._tokens:
            self.events.at(now, self._decode, index)

    def _decode(self, index: int) -> None:
        """Token `index` is complete: begin the pass that reads it."""
        self._post(t.TokenDecoded(REQUEST, index))
        self._begin_pass(self._prompt_tokens + index, 1)

    # --- a worker's loads ---------------------------------------------------------------------------------------

    def _load(self, command: t.Load) -> None:
        worker, slot = self._workers[command.worker], command.slot
        worker.slots[slot] = load = LoadTimes(command, self.events.now, worker.freed[slot], [])
        if command.form:
            load.share = self.profile.form_share(command.form)
        if worker.loading is None:
            self._begin_load(worker, load)
        else:
            worker.queue.append(load)

    def _begin_load(self, worker: _Worker, load: LoadTimes) -> None:
        worker.loading = load
        load.begun = now = self.events.now
        self.events.at(now + self._load_s * load.share, self._loaded, load)

    def _next_load(self, worker: _Worker) -> None:
        worker.loading = None
        while worker.queue:
            load = worker.queue.popleft()
            if not load.cancelled:
                self._begin_load(worker, load)
                return

    def _loaded(self, load: LoadTimes) -> None:
        if load.cancelled:
            return
        load.ended = now = self.events.now
        worker = self._workers[load.command.worker]
        self._next_load(worker)
        if self.spans is not None:
            self._add_load_spans(load)
        self._post(t.LoadEnded(load.command.load_id))
        if load.waiting:
            for call in load.waiting:
                self._begin_compute(worker, call, now)
            load.waiting.clear()  # the calls refer to the load: a cycle that only the collector would find

    def _add_load_spans(self, load: LoadTimes) -> None:
        now = self.events.now
        self._span(f"worker {load.command.worker}", "load", _label(load.command), load.begun, now)
        last_arrival = max([call.arrives for call in load.waiting], default=now)
        if last_arrival < now:
            self._span("main", "stall", "", self._gate, now)

    def _evict(self, command: t.Evict) -> None:
        worker, now = self._workers[command.worker], self.events.now
        load, worker.slots[command.slot] = worker.slots[command.slot], None
        if load is None:
            return
        load.cancelled = True
        in_flight = worker.loading is load
        if in_flight:
            now = load.begun + self.profile.ended_load_s(now - load.begun, load.share)
        if self.spans is not None:
            row = f"worker {command.worker}"
            if in_flight:
                self._span(row, "given up", _label(command), load.begun, now)
            self._span(row, "evict", _label(command), now, now)
        if in_flight and now > self.events.now:
            self.events.at(now, self._next_load, worker)
        elif in_flight:
            self._next_load(worker)

    # --- a worker's computations --------------------------------------------------------------------------------

    def _compute(self, command: t.Compute) -> None:
        worker, now = self._workers[command.worker], self.events.now
        load = worker.slots[command.slot]
        if load is None:
            return
        rows = command.stop - command.start
        arrives = self._links.sent(now, rows)
        call = CallTimes(command, load, rows, now, arrives, self._cause)
        if load is worker.loading and load.begun + self._load_s * load.share >= arrives:
            load.waiting.append(call)
        elif load.ended >= 0 and len(worker.slots) == 1:  # no other computation can come in between
            self._begin_compute(worker, call, arrives)
        else:
            self.events.at(arrives, self._arrived, call)

    def _arrived(self, call: CallTimes) -> None:
        if call.load.ended < 0:
            call.load.waiting.append(call)
        else:
            self._begin_compute(self._workers[call.command.worker], call, self.events.now)

    def _begin_compute(self, worker: _Worker, call: CallTimes, at: float) -> None:
        call.start = start = at if at > worker.free else worker.free
        call.end = worker.free = end = start + worker.compute_s(call.rows)
        self.events.at(end, self._computed, call)

    def _computed(self, call: CallTimes) -> None:
        command, now = call.command, self.events.now
        if call.load.cancelled:
            return
        if command.evict:
            self._workers[command.worker].slots[command.slot] = None
        comes = self._links.answered(now, call.rows)
        if self.spans is not None:
            self._add_call_spans(call, comes)
        self.events.at(comes, self._answered, call)

    def _add_call_spans(self, call: CallTimes, comes: float) -> None:
        command, now = call.command, self.events.now
        row, label = f"worker {command.worker}", _label(command)
        self._span(row, "transfer", f"{label} to #{command.call_id}", call.sent, call.arrives)
        self._span(row, "compute", label, call.start, call.end)
        if command.evict:
            self._span(row, "evict", label, now, now)
        self._span(row, "transfer", f"from #{command.call_id}", now, comes)

    def _answered(self, call: CallTimes) -> None:
        command = call.command
        if command.evict:
            self._workers[command.worker].freed[command.slot] = self.events.now
        self._foresight.answered(command.call_id)
        self._cause = call
        self._post(t.ComputeEnded(command.call_id))
        self._cause = None


def _label(command: t.Load | t.Evict | t.Compute) -> str:
    return f"{command.expert.layer}.{command.expert.expert}"
