"""The shadow on a virtual clock: passes one after the other, as far ahead as its alignments allow."""

from __future__ import annotations

from collections.abc import Callable

from scheduler import types as t
from scheduler.alignment import Alignment
from scheduler.simulation.events import EventHeap
from scheduler.simulation.workload import Workload
from scheduler.timing.links import MainLinks
from scheduler.timing.profile import Profile
from scheduler.trace import Span

LOOKAHEAD = 2
"""Passes by which a shadow may be ahead of the main model if no alignment is due, as in the engine."""


class SimulatedShadow:
    """The shadow of one request. `predicted`: receives its predictions as they arrive."""

    def __init__(
        self,
        events: EventHeap,
        profile: Profile,
        links: MainLinks,
        workload: Workload,
        alignment: Alignment,
        request: int,
        prompt_tokens: int,
        tokens: int,
        predicted: Callable[[t.Predicted], object],
        spans: list[Span] | None,
    ) -> None:
        self._events = events
        self._profile = profile
        self._links = links
        self._workload = workload
        self._alignment = alignment
        self._request = request
        self._prompt_tokens = prompt_tokens
        self._tokens = tokens
        self._predicted = predicted
        self._spans = spans
        self._step = -1  # the next decode pass; -1: the shadow has not read the prompt yet
        self._busy = True
        self._idle_since = 0.0
        self._announced = -1  # the last decode pass that the shadow may start

    def follow(self, command: t.Follow) -> None:
        """The shadow reads the prompt at the same time as the main node, and predicts nothing for it."""
        self._busy = True
        self._events.at(self._events.now + self._profile.layers * self._profile.shadow_layer_s, self._done, -1)
        self._add_layer_spans()

    def align(self, command: t.Align) -> None:
        now = self._events.now
        rows = (command.kv_stop - command.kv_start) * self._profile.layers
        arrives = self._links.aligned(now, rows)
        self._add_span("transfer", f"align {self._request}.{command.step} {command.kv_start}", now, arrives)
        self._events.at(arrives, self._aligned, command.step)

    def _aligned(self, step: int) -> None:
        self._announced = max(self._announced, step)
        self._start()

    def _start(self) -> None:
        """Begin the next pass if the alignment allows it."""
        step, now = self._step, self._events.now
        ahead = 0 if self._alignment.due(step) else LOOKAHEAD
        if self._busy or step > self._announced + ahead or step >= self._tokens - 1:
            return
        self._busy = True
        if now > self._idle_since:
            self._add_span("late", str(step), self._idle_since, now)
        self._add_layer_spans()
        position, end = self._prompt_tokens + step, now
        for layer in range(self._profile.layers):
            end += self._profile.shadow_layer_s
            experts = self._workload.predict(step, layer)
            if experts is not None:
                arrives = self._links.predicted(end)
                self._events.at(arrives, self._predicted, t.Predicted(self._request, position, layer, experts))
                self._add_span("transfer", f"prediction {layer} {self._request}.{position}", end, arrives)
        self._events.at(end, self._done, step)

    def _done(self, step: int) -> None:
        self._busy, self._idle_since = False, self._events.now
        self._step = step + 1
        self._start()

    def _add_layer_spans(self) -> None:
        for layer in range(self._profile.layers if self._spans is not None else 0):
            start = self._events.now + layer * self._profile.shadow_layer_s
            self._add_span("shadow", str(layer), start, start + self._profile.shadow_layer_s)

    def _add_span(self, what: str, label: str, start: float, end: float) -> None:
        if self._spans is not None:
            self._spans.append(Span("shadow", what, label, start, end))
