"""The shadow on a virtual clock: the passes of all requests together, as far ahead as their alignments allow.

`scheduler.departure` says when the shadow runs a pass, and when again. A workload says whether the shadow's own token
is the main model's, and what it predicts from it. Its own KV rows change no prediction of a random workload.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler import types as t
from scheduler.alignment import LATE, Alignment
from scheduler.departure import Course, Turn
from scheduler.simulation.events import EventHeap
from scheduler.simulation.workload import Workload
from scheduler.timing.links import MainLinks
from scheduler.timing.profile import Profile
from scheduler.trace import Span

LOOKAHEAD = 2
"""Passes by which a shadow may be ahead of the main model, as in the engine."""


@dataclass(slots=True, eq=False)
class _Pass:
    """A pass in flight."""

    followed: _Followed
    aligned: bool
    """No alignment that was due up to this pass was missing when it began."""
    same: bool
    """Until then the tokens that it read in place of missing ones were the main model's."""
    layer: int = 0
    """The next one."""


@dataclass(slots=True, eq=False)
class _Followed:
    """One request."""

    request: int
    workload: Workload
    prompt_tokens: int
    course: Course
    same: bool = True
    """The tokens that the shadow went on from by itself are the main model's."""
    prefilled: bool = False
    running: _Pass | None = None
    idle_since: float = 0.0
    sent: dict[int, dict[int, frozenset[int]]] = field(default_factory=dict)
    """Decode pass -> layer -> the experts that were predicted last."""


class SimulatedShadow:
    """The shadow of all requests. `predicted`: receives its predictions as they arrive."""

    def __init__(
        self,
        events: EventHeap,
        profile: Profile,
        links: MainLinks,
        alignment: Alignment,
        departure: str,
        predicted: Callable[[t.Predicted], object],
        spans: list[Span] | None,
    ) -> None:
        self._events = events
        self._profile = profile
        self._links = links
        self._alignment = alignment
        self._departure = departure
        self._predicted = predicted
        self._spans = spans
        self._opened: dict[int, _Followed] = {}
        self._followed: dict[int, _Followed] = {}
        self._busy = False

    def opened(self, request: int, workload: Workload, prompt_tokens: int, tokens: int) -> None:
        """A request that `follow` may name. `tokens`: of the answer."""
        course = Course(self._alignment, self._departure, LOOKAHEAD, 0, tokens - 1)
        self._opened[request] = _Followed(request, workload, prompt_tokens, course)

    # --- commands -----------------------------------------------------------------------------------------------

    def follow(self, command: t.Follow) -> None:
        """The shadow reads the prompt at the same time as the main node, and predicts nothing for it."""
        followed = self._followed[command.request] = self._opened[command.request]
        followed.running = _Pass(followed, aligned=True, same=True)
        self._advance()

    def align(self, command: t.Align) -> None:
        now = self._events.now
        rows = (command.kv_stop - command.kv_start) * self._profile.layers
        arrives = self._links.aligned(now, rows)
        self._add_span("transfer", f"align {command.request}.{command.step} {command.kv_start}", now, arrives)
        self._events.at(arrives, self._aligned, command)

    def unfollow(self, command: t.Unfollow) -> None:
        followed = self._followed.pop(command.request, None)
        if followed is not None:
            followed.running = None

    def _aligned(self, command: t.Align) -> None:
        followed = self._followed.get(command.request)
        if followed is None:
            return
        other = command.token and not followed.workload.same_token(command.step)
        gave_up = followed.course.gives_up(command.step)
        turn = followed.course.aligned(command.step, other, rows=command.kv_start < command.kv_stop)
        if (gave_up or turn == Turn.BACK) and followed.prefilled:
            followed.running = None
        self._advance()

    # --- passes -------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Begin the passes that may run, then a layer of those that have come least far, so that the others are joined.
        Passes that the main model has announced come before those that run ahead of it."""
        if self._busy:
            return
        for followed in self._followed.values():
            if followed.prefilled and followed.course.may_start():
                self._start(followed)
        running = [one.running for one in self._followed.values() if one.running is not None]
        if not running:
            return
        urgent = [one for one in running if not one.followed.prefilled or one.followed.course.urgent] or running
        layer = min(one.layer for one in urgent)
        together = [one for one in running if one.layer == layer]
        self._busy = True
        now, lasts_s = self._events.now, self._profile.shadow_s(len(together))
        self._events.at(now + lasts_s, self._routed, together)
        self._add_span("shadow", str(layer), now, now + lasts_s)

    def _start(self, followed: _Followed) -> None:
        course, now = followed.course, self._events.now
        step = course.step
        if self._departure == LATE and now > followed.idle_since:
            self._add_span("late", str(step), followed.idle_since, now)
        missing = any(self._alignment.due(one) for one in range(course.announced + 1, step + 1))
        if not missing:
            followed.same = True
        elif self._alignment.token_due(step):
            followed.same = followed.same and followed.workload.same_token(step)
        course.start()
        followed.running = _Pass(followed, aligned=not missing, same=followed.same)

    def _routed(self, together: list[_Pass]) -> None:
        """A layer of these passes has ended."""
        self._busy, now = False, self._events.now
        for one in together:
            if one.followed.running is not one:
                continue
            if one.followed.prefilled:
                self._predict(one, now)
            one.layer += 1
            if one.layer == self._profile.layers:
                self._ended(one.followed)
        self._advance()

    def _predict(self, one: _Pass, now: float) -> None:
        followed, layer, step = one.followed, one.layer, one.followed.course.step
        workload = followed.workload
        experts = workload.predict(step, layer) if one.aligned else workload.ahead(step, layer, one.same)
        before = followed.sent.setdefault(step, {})
        if experts is None or before.get(layer) == frozenset(experts):
            return
        before[layer] = frozenset(experts)
        arrives, position = self._links.predicted(now), followed.prompt_tokens + step
        self._events.at(arrives, self._predicted, t.Predicted(followed.request, position, layer, experts))
        self._add_span("transfer", f"prediction {layer} {followed.request}.{position}", now, arrives)

    def _ended(self, followed: _Followed) -> None:
        followed.running, followed.idle_since = None, self._events.now
        if not followed.prefilled:
            followed.prefilled = True
            return
        course = followed.course
        course.ended()
        for step in [step for step in followed.sent if step < min(course.announced, course.step)]:
            del followed.sent[step]

    def _add_span(self, what: str, label: str, start: float, end: float) -> None:
        if self._spans is not None:
            self._spans.append(Span("shadow", what, label, start, end))
