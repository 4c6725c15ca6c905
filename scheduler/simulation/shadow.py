"""The shadow on a virtual clock: the passes of all requests together, as far ahead as their alignments allow.

A pass that runs ahead of a due alignment reads the shadow's own token and KV rows. When the alignment comes, the shadow
goes back: at once if its token was another, else after the pass. It then says only what differs. Own KV rows alone are
assumed to change no prediction of a random workload.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler import types as t
from scheduler.alignment import LATE, Alignment
from scheduler.simulation.events import EventHeap
from scheduler.simulation.workload import Workload
from scheduler.timing.links import MainLinks
from scheduler.timing.profile import Profile
from scheduler.trace import Span

LOOKAHEAD = 2
"""Passes by which a shadow may be ahead of the main model, as in the engine."""

_PREFILL = -1


@dataclass(slots=True, eq=False)
class _Pass:
    """A pass in flight. `step` -1: over the prompt."""

    followed: _Followed
    step: int
    aligned: bool
    """Every alignment that is due up to this pass had come when it began."""
    same: bool
    """It reads the main model's token, as far as the shadow can know only later."""
    again: bool = False
    """It only repeats a pass with the main model's KV rows."""
    layer: int = 0
    """The next one."""


@dataclass(slots=True, eq=False)
class _Followed:
    """One request."""

    request: int
    workload: Workload
    prompt_tokens: int
    tokens: int
    """Of the answer."""
    step: int = _PREFILL
    """The next decode pass, or the one in flight."""
    announced: int = -1
    """The last decode pass that the main model has announced."""
    same: bool = True
    """The tokens that the shadow went on from by itself are the main model's."""
    again: bool = False
    """The next pass only repeats one with the main model's KV rows."""
    running: _Pass | None = None
    dirty: bool = False
    """KV rows have come during the pass in flight."""
    idle_since: float = 0.0
    sent: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    """Decode pass -> layer -> what was predicted last."""


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
        self._opened[request] = _Followed(request, workload, prompt_tokens, tokens)

    # --- commands -----------------------------------------------------------------------------------------------

    def follow(self, command: t.Follow) -> None:
        """The shadow reads the prompt at the same time as the main node, and predicts nothing for it."""
        followed = self._followed[command.request] = self._opened[command.request]
        followed.running = _Pass(followed, _PREFILL, aligned=True, same=True)
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
        followed, step = self._followed.get(command.request), command.step
        if followed is None:
            return
        followed.announced = max(followed.announced, step)
        running = followed.running
        if running is not None and running.again and running.step < step:
            followed.running, followed.step = None, running.step + 1  # the pass that it repeats will do
        begun = followed.step > step or (followed.running is not None and followed.step == step)
        if begun:
            self._check(followed, command)
        self._advance()

    def _check(self, followed: _Followed, command: t.Align) -> None:
        """An alignment of a pass that has begun without it."""
        step = command.step
        if command.token and not followed.workload.same_token(step):
            self._go_back(followed, step, again=False)
        elif command.kv_start < command.kv_stop:
            if followed.step == step:
                followed.dirty = True
            else:
                self._go_back(followed, step, again=True)

    def _go_back(self, followed: _Followed, step: int, again: bool) -> None:
        followed.step, followed.again, followed.running, followed.dirty = step, again, None, False

    # --- passes -------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Begin the passes that may run, then a layer of those that have come least far, so that the others are joined.
        Passes that the main model has announced come before those that run ahead of it."""
        if self._busy:
            return
        for followed in self._followed.values():
            self._start(followed)
        running = [one.running for one in self._followed.values() if one.running is not None]
        if not running:
            return
        urgent = [one for one in running if one.step <= one.followed.announced] or running
        layer = min(one.layer for one in urgent)
        together = [one for one in running if one.layer == layer]
        self._busy = True
        self._events.at(self._events.now + self._profile.shadow_s(len(together)), self._routed, together)
        self._add_span("shadow", str(layer), self._events.now, self._events.now + self._profile.shadow_s(len(together)))

    def _start(self, followed: _Followed) -> None:
        step, now = followed.step, self._events.now
        if followed.running is not None or step < 0 or step >= followed.tokens - 1:
            return
        alignment, announced = self._alignment, followed.announced
        if not alignment.may_start(step, announced, LOOKAHEAD, self._departure):
            return
        if self._departure == LATE and now > followed.idle_since:
            self._add_span("late", str(step), followed.idle_since, now)
        if alignment.token_due(step):
            same = followed.workload.same_token(step) and (followed.same or alignment.token_due(step - 1))
            followed.same = step <= announced or same
        aligned = step <= announced or not any(alignment.due(one) for one in range(announced + 1, step + 1))
        followed.running = _Pass(followed, step, aligned, followed.same, followed.again)
        followed.again = False

    def _routed(self, together: list[_Pass]) -> None:
        """A layer of these passes has ended."""
        self._busy, now = False, self._events.now
        for one in together:
            followed = one.followed
            if followed.running is not one:
                continue
            if one.step >= 0:
                self._predict(one, now)
            one.layer += 1
            if one.layer == self._profile.layers:
                self._ended(one)
        self._advance()

    def _predict(self, one: _Pass, now: float) -> None:
        followed, layer = one.followed, one.layer
        workload = followed.workload
        experts = workload.predict(one.step, layer) if one.aligned else workload.ahead(one.step, layer, one.same)
        before = followed.sent.setdefault(one.step, {})
        if experts is None or before.get(layer) == experts:
            return
        before[layer] = experts
        arrives, position = self._links.predicted(now), followed.prompt_tokens + one.step
        self._events.at(arrives, self._predicted, t.Predicted(followed.request, position, layer, experts))
        self._add_span("transfer", f"prediction {layer} {followed.request}.{position}", now, arrives)

    def _ended(self, one: _Pass) -> None:
        followed = one.followed
        followed.running, followed.idle_since = None, self._events.now
        if followed.dirty and followed.announced == one.step:
            self._go_back(followed, one.step, again=True)
            return
        followed.step, followed.dirty = one.step + 1, False
        for step in [step for step in followed.sent if step < min(followed.announced, one.step)]:
            del followed.sent[step]

    def _add_span(self, what: str, label: str, start: float, end: float) -> None:
        if self._spans is not None:
            self._spans.append(Span("shadow", what, label, start, end))
