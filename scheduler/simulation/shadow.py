"""The shadow on a virtual clock: the passes of all requests together, as far ahead as their alignments allow.

`scheduler.departure` says when the shadow runs a pass, and when again. A workload says whether the shadow's own token
is the main model's, and what it predicts from it. Its own KV rows change no prediction of a random workload.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler import types as t
from scheduler.alignment import LATE
from scheduler.departure import LOOKAHEAD, Rewind, ShadowSchedule
from scheduler.simulation.events import EventHeap
from scheduler.simulation.own_tokens import OwnTokens
from scheduler.simulation.scenario import Scenario
from scheduler.simulation.workload import Workload
from scheduler.timing.links import MainLinks
from scheduler.trace import Span


class Draft(NamedTuple):
    """As `wire.messages.Draft`."""

    request: int
    step: int
    token: int
    path: int


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
    course: ShadowSchedule
    same: bool = True
    """The tokens that the shadow went on from by itself are the main model's."""
    prefilled: bool = False
    running: _Pass | None = None
    idle_since: float = 0.0
    sent: dict[int, dict[int, frozenset[int]]] = field(default_factory=dict)
    """Decode pass -> layer -> the experts that were predicted last."""
    own: OwnTokens | None = None
    """Once the main model has asked for drafts."""
    told: int = -1
    """The last pass whose alignment has come."""
    states_sent: int | None = None
    """The last pass with whose KV rows states were sent."""

    def has_begun(self, step: int) -> bool:
        """Whether a pass has begun, and was not taken back."""
        return step < self.course.step or (step == self.course.step and self.course.running)


class SimulatedShadow:
    """The shadow of all requests. `predicted`, `drafted`: receive its predictions and drafts as they arrive."""

    def __init__(
        self,
        events: EventHeap,
        scenario: Scenario,
        links: MainLinks,
        predicted: Callable[[t.Predicted], object],
        drafted: Callable[[Draft], object],
        spans: list[Span] | None,
    ) -> None:
        self._events = events
        self._profile = scenario.profile
        self._links = links
        self._alignment = scenario.alignment
        self._departure = scenario.system.departure
        self._predicted = predicted
        self._drafted = drafted
        self._spans = spans
        self._opened: dict[int, _Followed] = {}
        self._followed: dict[int, _Followed] = {}
        self._busy = False

    def add_request(self, request: int, workload: Workload, prompt_tokens: int, tokens: int) -> None:
        """A request that `follow` may name. `tokens`: of the answer."""
        course = ShadowSchedule(self._alignment, self._departure, LOOKAHEAD, 0, tokens - 1)
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
        arrives = self._links.send_alignment(now, rows, self._states_due(command))
        self._add_span("transfer", f"align {command.request}.{command.step} {command.kv_start}", now, arrives)
        self._events.at(arrives, self._on_align, command)

    def _states_due(self, command: t.Align) -> bool:
        followed = self._followed.get(command.request)
        period = self._alignment.states_every(self._profile.state_bytes)
        if followed is None or not period or command.kv_start == command.kv_stop:
            return False
        sent = followed.states_sent if command.kv_start else None
        due = sent is None or command.step - sent >= period
        followed.states_sent = command.step if due else sent
        return due

    def unfollow(self, command: t.Unfollow) -> None:
        followed = self._followed.pop(command.request, None)
        if followed is not None:
            followed.running = None

    def _on_align(self, command: t.Align) -> None:
        followed = self._followed.get(command.request)
        if followed is None:
            return
        other = self._first_other(followed, command)
        gave_up = followed.course.gives_up(command.step)
        rows = command.kv_start < command.kv_stop
        turn = followed.course.on_aligned(
            command.step, other is not None, rows, drafts=command.drafts, first_other=other
        )
        if (gave_up or turn == Rewind.BACK) and followed.prefilled:
            followed.running = None
        if turn == Rewind.BACK and followed.own is not None:
            self._go_back(followed, followed.own)
        self._advance()

    def _first_other(self, followed: _Followed, command: t.Align) -> int | None:
        """The first pass that has read another token than the main model's, of those whose tokens have come."""
        step, before = command.step, followed.told
        followed.told = step
        if command.drafts and followed.own is None:
            followed.own = OwnTokens(followed.workload, step)
            before = step - 1
            for one in range(step, followed.course.step + followed.course.running):
                followed.own.right(one)
        if not command.token:
            return None
        if followed.own is None:
            return None if followed.workload.same_token(step) else step
        told = range(before + 1, step + 1)
        other = next((one for one in told if followed.has_begun(one) and not followed.own.right(one)), None)
        followed.own.on_told(told)
        return other

    def _go_back(self, followed: _Followed, own: OwnTokens) -> None:
        step = followed.course.step
        own.back(step)
        if not followed.course.again:  # the main model may have used up what was predicted from another token
            followed.sent = {one: of for one, of in followed.sent.items() if one < step}

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
        self._events.at(now + lasts_s, self._on_layer_ended, together)
        self._add_span("shadow", str(layer), now, now + lasts_s)

    def _start(self, followed: _Followed) -> None:
        course, now = followed.course, self._events.now
        step = course.step
        if self._departure == LATE and now > followed.idle_since:
            self._add_span("late", str(step), followed.idle_since, now)
        missing = any(course.alignment.due(one) for one in range(course.announced + 1, step + 1))
        if followed.own is not None:
            followed.same = followed.own.right(step) or step <= course.announced
            missing = step > course.announced
        elif not missing:
            followed.same = True
        elif course.alignment.token_due(step):
            followed.same = followed.same and followed.workload.same_token(step)
        course.start()
        followed.running = _Pass(followed, aligned=not missing, same=followed.same)

    def _on_layer_ended(self, together: list[_Pass]) -> None:
        """A layer of these passes has ended."""
        self._busy, now = False, self._events.now
        for one in together:
            if one.followed.running is not one:
                continue
            if one.followed.prefilled:
                self._predict(one, now)
            one.layer += 1
            if one.layer == self._profile.layers:
                self._on_pass_ended(one.followed)
        self._advance()

    def _predict(self, one: _Pass, now: float) -> None:
        followed, layer, step = one.followed, one.layer, one.followed.course.step
        workload = followed.workload
        experts = workload.predict(step, layer) if one.aligned else workload.ahead(step, layer, one.same)
        before = followed.sent.setdefault(step, {})
        if experts is None or before.get(layer) == frozenset(experts):
            return
        before[layer] = frozenset(experts)
        arrives, position = self._links.send_prediction(now), followed.prompt_tokens + step
        self._events.at(arrives, self._predicted, t.Predicted(followed.request, position, layer, experts))
        self._add_span("transfer", f"prediction {layer} {followed.request}.{position}", now, arrives)

    def _on_pass_ended(self, followed: _Followed) -> None:
        followed.running, followed.idle_since = None, self._events.now
        if not followed.prefilled:
            followed.prefilled = True
            return
        course = followed.course
        self._draft(followed, course.step)
        course.on_ended()
        for step in [step for step in followed.sent if step < min(course.announced, course.step)]:
            del followed.sent[step]
        if followed.own is not None:
            followed.own.forget(min(course.announced, course.step))

    def _draft(self, followed: _Followed, step: int) -> None:
        """Pass `step` has ended."""
        draft = followed.own.draft(step) if followed.own is not None else None
        if draft is not None:
            arrives = self._links.send_prediction(self._events.now)
            self._events.at(arrives, self._drafted, Draft(followed.request, step + 1, *draft))

    def _add_span(self, what: str, label: str, start: float, end: float) -> None:
        if self._spans is not None:
            self._spans.append(Span("shadow", what, label, start, end))
