"""The scheduler on a virtual clock: a heap of events, the very same core, timings from a profile.

The worlds of the main node, the shadow and the workers are reduced to how long things take. Decode only, so far.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler import types as t
from scheduler.alignment import Alignment
from scheduler.core import Core
from scheduler.ledger import RequestLedger
from scheduler.placement import RoundRobin
from scheduler.profile import Profile
from scheduler.trace import Span

REQUEST = 1
Routes = Callable[[int, int], tuple[int, ...]]
"""(position, layer) -> the experts of one token."""


@dataclass(slots=True)
class Outcome:
    """`token_s`: when each decode pass ended, from the start of the first."""

    token_s: list[float]
    spans: list[Span]
    ledger: RequestLedger

    @property
    def tokens_per_s(self) -> float:
        return len(self.token_s) / self.token_s[-1]


@dataclass(slots=True)
class _Worker:
    link_free: float = 0.0
    compute_free: float = 0.0
    loaded: dict[int, float] = field(default_factory=dict)


class Simulator:
    """Decodes `tokens` tokens. `predict(position, layer)`: what the shadow says, None: no shadow.

    A slot that was evicted while it loaded is free at once, as the worker's own loader gives such a load up.
    """

    def __init__(
        self, profile: Profile, alignment: Alignment, tokens: int, routes: Routes, predict: Routes | None
    ) -> None:
        self.profile = profile
        shape = t.ModelShape(tuple(range(profile.layers)), profile.experts, profile.top_k)
        self.core = Core(shape, RoundRobin(profile.group_size), alignment)
        self._alignment = alignment
        self._tokens = tokens
        self._routes = routes
        self._predict = predict
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._workers = [_Worker() for _ in range(profile.workers)]
        self._given_up: dict[int, float] = {}
        self._loading: dict[tuple[int, int], int] = {}
        self._shadow_step = 0
        self._shadow_busy = False
        self._shadow_idle = 0.0
        self._pass_began = 0.0
        self._announced = -1
        self._aligned: dict[int, float] = {}
        self._gate_fired = 0.0
        self._out = Outcome([], [], RequestLedger(0))

    def run(self) -> Outcome:
        for number in range(self.profile.workers):
            self._post(t.WorkerJoined(number, 1))
        if self._predict is not None:
            self._post(t.ShadowJoined())
        self._post(t.RequestOpened(REQUEST, 0))
        self._begin_pass(0)
        while self._heap and len(self._out.token_s) < self._tokens:
            self._now, _, act = heapq.heappop(self._heap)
            act()
        self._out.ledger = self.core.ledgers[REQUEST]
        self._out.ledger.close()
        return self._out

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._order), act))

    def _post(self, event: t.Event) -> None:
        for command in self.core.handle(event, self._now):
            self._act(command)

    def _span(self, row: str, what: str, label: str, start: float, end: float) -> None:
        self._out.spans.append(Span(row, what, label, start, end))

    # --- the main node ------------------------------------------------------------------------------------------

    def _begin_pass(self, position: int) -> None:
        self._pass_began = self._now
        self._post(t.TokenDecoded(REQUEST, position))
        self._post(t.PassStarted(REQUEST, position, 1, prefill=False))
        self._begin_layer(position, 0)

    def _begin_layer(self, position: int, layer: int) -> None:
        end = self._now + self.profile.main_layer_s
        self._span("main", "layer", f"{layer}", self._now, end)

        def fire() -> None:
            self._gate_fired = self._now
            experts = sorted(self._routes(position, layer))
            self._post(t.GateFired(t.Visit(REQUEST, position, layer), tuple((e, 1) for e in experts)))

        self._at(end, fire)

    def _resume(self, visit: t.Visit) -> None:
        if visit.layer + 1 < self.profile.layers:
            self._begin_layer(visit.position, visit.layer + 1)
            return
        self._span("main", "token", f"{REQUEST}.{visit.position}", self._pass_began, self._now)
        self._out.token_s.append(self._now)
        if len(self._out.token_s) < self._tokens:
            self._begin_pass(visit.position + 1)

    # --- the workers --------------------------------------------------------------------------------------------

    def _act(self, command: t.Command) -> None:
        if isinstance(command, t.Load):
            self._load(command)
        elif isinstance(command, t.Evict):
            load = self._loading.pop((command.worker, command.slot), None)
            if load is not None:
                self._given_up[load] = self._now
                self._workers[command.worker].link_free = self._now
        elif isinstance(command, t.Compute):
            self._compute(command)
        elif isinstance(command, t.Resume):
            visit = command.visit
            self._at(self._now, lambda: self._resume(visit))
        elif isinstance(command, t.Align):
            self._align(command)

    def _load(self, command: t.Load) -> None:
        worker = self._workers[command.worker]
        start = max(self._now, worker.link_free)
        end = worker.link_free = start + self.profile.load_s
        worker.loaded[command.load_id] = end
        self._loading[command.worker, command.slot] = command.load_id
        label = f"{command.expert.layer}.{command.expert.expert}"

        def ended() -> None:
            given_up = self._given_up.get(command.load_id)
            what, until = ("load", end) if given_up is None else ("given up", max(start, given_up))
            self._span(f"worker {command.worker}", what, label, start, until)
            if given_up is None:
                self._loading.pop((command.worker, command.slot), None)
                self._post(t.LoadEnded(command.load_id))

        self._at(end, ended)

    def _compute(self, command: t.Compute) -> None:
        worker = self._workers[command.worker]
        rows = command.stop - command.start
        arrives = self._now + self.profile.transfer_s(rows)
        held = self._loading.get((command.worker, command.slot))
        ready = worker.loaded[held] if held is not None else self._now
        start = max(arrives, ready, worker.compute_free)
        end = worker.compute_free = start + self.profile.compute_s(rows)
        back = end + self.profile.transfer_s(rows)
        label = f"{command.expert.layer}.{command.expert.expert}"
        self._span(f"worker {command.worker}", "compute", label, start, end)
        if ready > arrives:
            self._span("main", "stall", "", self._gate_fired, ready)
        self._at(back, lambda: self._post(t.ComputeEnded(command.call_id)))

    # --- the shadow ---------------------------------------------------------------------------------------------

    def _align(self, command: t.Align) -> None:
        rows = command.kv_stop - command.kv_start
        nbytes = rows * self.profile.kv_bytes * self.profile.layers
        arrives = self._now + max(self.profile.hop_s, nbytes * 8 / self.profile.link_bits_per_s)

        def arrived() -> None:
            self._announced = max(self._announced, command.step)
            self._shadow_go()

        self._span("shadow", "transfer", f"align {command.step}", self._now, arrives)
        self._at(arrives, arrived)

    def _shadow_go(self) -> None:
        step = self._shadow_step
        ahead = 0 if self._alignment.due(step) else 2
        if not self._shadow_busy and step <= self._announced + ahead and step < self._tokens:
            self._shadow_busy = True
            if self._now > self._shadow_idle:
                self._span("shadow", "late", f"{step}", self._shadow_idle, self._now)
            self._shadow_layer(step, 0)

    def _shadow_layer(self, step: int, layer: int) -> None:
        end = self._now + self.profile.shadow_layer_s
        self._span("shadow", "shadow", f"{layer}", self._now, end)

        def done() -> None:
            experts = self._predict(step, layer) if self._predict else ()
            self._at(self._now + self.profile.hop_s, lambda: self._post(t.Predicted(REQUEST, step, layer, experts)))
            if layer + 1 < self.profile.layers:
                self._shadow_layer(step, layer + 1)
            else:
                self._shadow_busy, self._shadow_idle = False, self._now
                self._shadow_step += 1
                self._shadow_go()

        self._at(end, done)


def random_routes(profile: Profile, seed: int) -> Routes:
    """Uniform routes, the same for the same seed."""

    def routes(position: int, layer: int) -> tuple[int, ...]:
        draw = random.Random(seed * 1_000_003 + position * 1009 + layer)
        return tuple(draw.sample(range(profile.experts), profile.top_k))

    return routes


def predictor(profile: Profile, routes: Routes, recall: float, seed: int) -> Routes:
    """Names each activated expert with probability `recall`, else one that is not activated."""

    def predict(position: int, layer: int) -> tuple[int, ...]:
        draw = random.Random(seed * 7_000_003 + position * 1013 + layer)
        true = routes(position, layer)
        others = [e for e in range(profile.experts) if e not in true]
        draw.shuffle(others)
        return tuple(e if draw.random() < recall else others.pop() for e in true)

    return predict
