"""Follows which experts gates choose, and what each worker is busy with, while somebody watches."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from main_node.activity import HIT, HOST, IN_TIME, LATE, MISSED, Activity, ExpertAccess, WorkerActivity
from main_node.totals import Totals
from scheduler import types as t
from scheduler.core.machine import Core

KEPT = 16384
"""Accesses that are kept: a second of 20 tokens/s through 61 layers has up to 10,000."""
WATCHED_S = 5.0
"""How long after a reading it goes on."""


@dataclass(slots=True)
class _Worker:
    has_slots: bool
    at: float
    """The engine's time up to which its seconds are counted."""
    held: dict[int, t.ExpertId] = field(default_factory=dict)
    """By slot."""
    loading: dict[int, int] = field(default_factory=dict)
    """Load's id -> slot."""
    calls: dict[int, int] = field(default_factory=dict)
    """Computation's id -> slot."""
    evicting: set[int] = field(default_factory=set)
    """Computations after which their slot is free."""
    load_s: float = 0.0
    compute_s: float = 0.0
    loads: int = 0
    computations: int = 0

    def advance(self, now: float) -> None:
        """What it has done until now lasts no longer."""
        passed, self.at = max(0.0, now - self.at), now
        if self.loading:
            self.load_s += passed
        if self.calls and (not self.loading or not set(self.calls.values()) <= set(self.loading.values())):
            self.compute_s += passed

    def free(self, slot: int) -> None:
        """What was asked of a slot is not answered any more."""
        self.held.pop(slot, None)
        self.evicting -= {number for number, of in self.calls.items() if of == slot}
        for asked in (self.loading, self.calls):
            for number in [number for number, of in asked.items() if of == slot]:
                del asked[number]


class _Held(NamedTuple):
    worker: int
    slot: int
    load_id: int
    """0: it was there before anybody watched."""
    begun: int
    """The number of the event at which its load began."""


class ActivityWatch:
    """An observer of the engine, which holds its lock. Off until it is read, and again `WATCHED_S` after the last
    reading: then an event costs it a comparison.

    It keeps books of its own, from events and commands alone; they begin with what the slots hold.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._on = False
        self._until = 0.0
        self._count = 0
        self._accesses: deque[ExpertAccess] = deque(maxlen=KEPT)
        self._clear()

    def _clear(self) -> None:
        self._workers: dict[int, _Worker] = {}
        self._held: dict[t.ExpertId, _Held] = {}
        self._missing: dict[t.ExpertId, int] = {}
        """Chosen, and without a worker yet -> the outcome: late or missed."""
        self._step = self._event = 0
        """Their numbers."""
        self._gates: dict[int, tuple[int, int, int]] = {}
        """Layer -> the step of its latest gates, the event of the last of these, and that of the step before."""
        self._predicted: dict[t.Visit, tuple[int, ...]] = {}
        """Of layers whose gates have not fired."""
        self._passed: dict[tuple[int, int], int] = {}
        """Request and layer -> position of its latest gate."""
        self._predictions = 0

    def read(self, since: int | None, now: float, totals: Totals) -> Activity:
        """`since`: None, or the count of another main node: no accesses."""
        if not self._on:
            self._begin(now)
        self._until = time.monotonic() + WATCHED_S
        new = self._count - since if since is not None else 0
        new = min(new, len(self._accesses)) if new > 0 else 0
        latest = tuple(self._accesses)[len(self._accesses) - new :] if new else ()
        for worker in self._workers.values():
            worker.advance(now)
        workers = tuple(_activity(number, worker) for number, worker in sorted(self._workers.items()))
        return Activity(self._count, latest, now, workers, self._predictions, totals)

    def _begin(self, now: float) -> None:
        self._clear()
        self._on = True
        for number, found in self._core.snapshot().workers.items():
            worker = self._workers[number] = _Worker(bool(found.slots), now)
            for slot, expert in enumerate(found.slots):
                if expert is not None:
                    worker.held[slot] = expert
                    self._held[expert] = _Held(number, slot, 0, 0)

    def on_handled(self, event: t.Event, now: float, commands: list[t.Command]) -> None:
        """See `Observer`."""
        if not self._on:
            return
        self._event += 1
        if isinstance(event, t.GateFired):
            if time.monotonic() > self._until:
                self._on = False
                self._clear()
                return
            self._on_gate(event, commands)
        elif isinstance(event, t.LoadEnded | t.LoadFailed | t.ComputeEnded | t.ComputeFailed):
            self._on_ended(event, now)
        elif isinstance(event, t.StepStarted):
            self._step += 1
        elif isinstance(event, t.Predicted):
            self._on_predicted(event)
        elif isinstance(event, t.RequestClosed):
            self._on_closed(event.request)
        elif isinstance(event, t.WorkerJoined):
            self._drop(event.worker)
            self._workers[event.worker] = _Worker(event.slots > 0, now)
        elif isinstance(event, t.WorkerLost):
            self._drop(event.worker)
        for command in commands:
            if isinstance(command, t.Load | t.Compute | t.Evict):
                worker = self._workers.get(command.worker)
                if worker is not None:
                    worker.advance(now)
                    self._on_command(command, worker)

    def _drop(self, number: int) -> None:
        if self._workers.pop(number, None) is not None:
            for expert in [expert for expert, held in self._held.items() if held.worker == number]:
                del self._held[expert]

    def _on_closed(self, request: int) -> None:
        self._predicted = {visit: one for visit, one in self._predicted.items() if visit.request != request}
        self._passed = {key: position for key, position in self._passed.items() if key[0] != request}

    def _on_predicted(self, event: t.Predicted) -> None:
        self._predictions += 1
        if event.position > self._passed.get((event.request, event.layer), -1):
            self._predicted[t.Visit(event.request, event.position, event.layer)] = event.experts

    def _on_gate(self, event: t.GateFired, commands: list[t.Command]) -> None:
        layer = event.visit.layer
        step, latest, before = self._gates.get(layer, (0, 0, 0))
        if step != self._step:
            before = latest
        self._gates[layer] = self._step, self._event, before
        predicted = self._predicted.pop(event.visit, ())
        self._passed[event.visit.request, layer] = event.visit.position
        for number in _computed(event, commands):
            expert = t.ExpertId(layer, number)
            held = self._held.get(expert)
            if held is None:
                self._missing[expert] = LATE if number in predicted else MISSED
                continue
            is_late = held.load_id in self._workers[held.worker].loading
            # A load for this gate began after the layer's gates of the step before.
            outcome = LATE if is_late else IN_TIME if held.begun > before else HIT
            self._add(expert, outcome, held.worker)

    def _add(self, expert: t.ExpertId, outcome: int, worker: int) -> None:
        self._count += 1
        self._accesses.append(ExpertAccess(*expert, outcome, worker))

    def _on_ended(self, event: t.LoadEnded | t.LoadFailed | t.ComputeEnded | t.ComputeFailed, now: float) -> None:
        is_load = isinstance(event, t.LoadEnded | t.LoadFailed)
        key = event.load_id if isinstance(event, t.LoadEnded | t.LoadFailed) else event.call_id
        for worker in self._workers.values():
            asked = worker.loading if is_load else worker.calls
            if key in asked:
                worker.advance(now)
                slot = asked.pop(key)
                if not is_load and key in worker.evicting:
                    worker.evicting.discard(key)
                    worker.held.pop(slot, None)
                return

    def _on_command(self, command: t.Load | t.Compute | t.Evict, worker: _Worker) -> None:
        if isinstance(command, t.Load):
            worker.loads += 1
            worker.held[command.slot] = command.expert
            worker.loading[command.load_id] = command.slot
            self._held[command.expert] = _Held(command.worker, command.slot, command.load_id, self._event)
            self._settle_missing(command.expert, command.worker)
        elif isinstance(command, t.Evict):
            worker.free(command.slot)
            self._forget(command.expert, command.worker, command.slot)
        else:
            worker.computations += 1
            worker.calls[command.call_id] = command.slot if worker.has_slots else -1
            if not worker.has_slots:
                self._settle_missing(command.expert, command.worker, HOST)
            elif command.evict:
                worker.evicting.add(command.call_id)
                self._forget(command.expert, command.worker, command.slot)

    def _settle_missing(self, expert: t.ExpertId, worker: int, instead: int | None = None) -> None:
        outcome = self._missing.pop(expert, None)
        if outcome is not None:
            self._add(expert, outcome if instead is None else instead, worker)

    def _forget(self, expert: t.ExpertId, worker: int, slot: int) -> None:
        held = self._held.get(expert)
        if held is not None and (held.worker, held.slot) == (worker, slot):
            del self._held[expert]


def _computed(event: t.GateFired, commands: list[t.Command]) -> Iterable[int]:
    """The experts that compute: the gate's, or those that the router has put in their place."""
    for command in commands:
        if isinstance(command, t.Route) and command.visit == event.visit and command.experts:
            return sorted({expert for row in command.experts for expert in row})
    return [expert for expert, _ in event.rows]


def _activity(number: int, worker: _Worker) -> WorkerActivity:
    return WorkerActivity(
        number=number,
        loading=len(worker.loading),
        computing=len(worker.calls),
        held=len(worker.held),
        load_s=worker.load_s,
        compute_s=worker.compute_s,
        loads=worker.loads,
        computations=worker.computations,
    )
