"""The passes of all requests, on one thread: in lock-step, one row of each.

A lone request's pass runs by itself, since to stop it at each layer would cost 5 % of its time. Of several requests,
a layer of all passes that have come to it is done together: their predictions leave, then their experts' rows are
multiplied together. Of the passes in flight those at the lowest layer go on, so that the others are joined. Passes that
the main model has announced come before those that run ahead of it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from checkpoint.coroutine import Coroutine
from scheduler.alignment import LATE
from scheduler.departure import Rewind
from shadow_node.followed import Followed
from shadow_node.model import Gate, ShadowModel
from shadow_node.pace import Pace
from wire.messages import Align, Message, Prediction, ShadowProgress
from wire.tracing import NodeSpans


class _Dropped(BaseException):
    """Ends a pass in flight."""


@dataclass(slots=True, eq=False)
class _Pass:
    """A pass in flight, which stands at a gate."""

    followed: Followed
    run: Coroutine[int] | None
    """None: a lone one."""
    gate: Gate | None = None
    """None: a lone one, or it has ended."""


class PassOwner(Protocol):
    """What runs passes: a stream of the main node."""

    @property
    def spans(self) -> NodeSpans: ...

    def requests(self) -> Sequence[Followed]:
        """Those that are followed just now."""

    def take(self) -> None:
        """Handle the messages that have come."""

    def send(self, message: Message) -> None:
        """To the main node."""

    def on_pass_ended(self, followed: Followed) -> None: ...

    def on_pass_failed(self, error: BaseException) -> None: ...


class Passes:
    def __init__(
        self,
        model: ShadowModel,
        pace: Pace,
        owner: PassOwner,
    ) -> None:
        self._model = model
        self._pace = pace
        self._owner = owner
        self._running: dict[Followed, _Pass] = {}
        self._waiting: dict[Followed, float] = {}
        """Since when a request has waited for its alignment, at a late departure."""
        self._since = 0.0
        """The end of the layer before."""

    def receive(self, followed: Followed, message: Align) -> None:
        """An alignment, or a part of one, has come. Raises ProtocolError if it does not fit."""
        if followed.receive(message) == Rewind.BACK:
            self._drop(followed)
        self._draft(followed)

    def _draft(self, followed: Followed) -> None:
        for draft in followed.tokens.take_drafts():
            self._owner.send(draft)

    def advance(self) -> bool:
        """Run one layer, or a lone pass. Returns False if no pass may run."""
        ran = self._start_all()
        if not self._running:
            return ran
        layer, together = self._next()
        self._layer_ends(layer, len(together))
        for one in together:
            if one.gate is not None and self._goes_on(one):
                self._predict(one.followed, layer, one.gate.experts, one.gate.scores)
        self._go_on([one for one in together if self._goes_on(one)])
        return True

    def _layer_ends(self, layer: int, rows: int) -> None:
        """Its gates have fired, and messages may have come meanwhile."""
        self._pace.layer(rows, self._undisturbed_until())
        self._owner.take()
        self._owner.spans.add("shadow", str(layer), self._since, self._now())

    def _now(self) -> float:
        self._since = self._owner.spans.now()
        return self._since

    def _undisturbed_until(self) -> float:
        """In emulated time: before then no alignment can come that changes what follows."""
        requests = self._owner.requests()
        if len(requests) == 1 and requests[0].departure == LATE and not requests[0].tokens.drafting:
            return math.inf
        announced_at = min((followed.announced_at for followed in requests), default=-math.inf)
        return announced_at + self._model.layers * self._pace.main_layer_s

    # --- which pass ---------------------------------------------------------------------------------------------

    def _start_all(self) -> bool:
        """Begin what may begin. Returns whether a lone pass has run to its end."""
        if not self._running:
            self._since = self._owner.spans.now()
        requests = self._owner.requests()
        for gone in [followed for followed in self._running if followed.closed]:
            self._drop(gone)
        for gone in self._waiting.keys() - set(requests):
            del self._waiting[gone]
        alone = len(requests) == 1 and not self._running
        ran = False
        for followed in requests:
            if followed in self._running or followed.closed or followed.broken:
                continue
            tokens = self._tokens_of(followed)
            if tokens and alone:
                self._run_alone(followed, tokens)
                ran = True
            elif tokens:
                one = self._running[followed] = _Pass(followed, self._model.lock_step(tokens, followed.cache))
                self._resume(one, None)
        return ran

    def _tokens_of(self, followed: Followed) -> list[int]:
        """What its next pass reads, which begins; empty if none may."""
        if not followed.prefilled:
            return self._begin_reading(followed)
        if followed.may_start():
            return self._begin_decoding(followed)
        self._rest(followed)
        return []

    def _begin_reading(self, followed: Followed) -> list[int]:
        try:
            return followed.reading.next_tokens()
        except BaseException as error:  # noqa: BLE001 - the other requests go on
            self._fail(followed, error)
            return []

    def _rest(self, followed: Followed) -> None:
        """It waits for an alignment."""
        if followed.departure == LATE:
            self._waiting.setdefault(followed, self._owner.spans.now())
        announced = followed.course.announced
        if self._pace.is_emulated and followed.idle_at != announced:
            followed.idle_at = announced
            self._owner.send(ShadowProgress(followed.number, announced, idle=True))

    def _begin_decoding(self, followed: Followed) -> list[int]:
        spans, step = self._owner.spans, followed.course.step
        began = spans.now()
        since = self._waiting.pop(followed, began)
        if since < began:
            spans.add("late", str(step), since, began)
        try:
            token, aligned = followed.start()
        except BaseException as error:  # noqa: BLE001 - the other requests go on
            self._fail(followed, error)
            return []
        if aligned:
            spans.add("align", str(step), began, spans.now())
        return [token]

    def _next(self) -> tuple[int, list[_Pass]]:
        """A layer, and the passes that do it together."""
        running = list(self._running.values())
        urgent = [one for one in running if not one.followed.prefilled or one.followed.course.urgent] or running
        layer = min(one.gate.layer for one in urgent if one.gate)
        return layer, [one for one in running if one.gate and one.gate.layer == layer]

    # --- a layer ------------------------------------------------------------------------------------------------

    def _goes_on(self, one: _Pass) -> bool:
        return self._running.get(one.followed) is one and not one.followed.closed

    def _predict(self, followed: Followed, layer: int, experts: list[int], scores: list[float]) -> None:
        if not followed.prefilled:
            return
        if followed.news(layer, experts):
            prediction = Prediction(followed.number, followed.position, layer, tuple(experts), tuple(scores))
            self._owner.spans.on_sent(prediction)
            self._owner.send(prediction)
        elif self._pace.is_emulated:
            self._owner.send(ShadowProgress(followed.number, max(followed.course.announced, 0), idle=False))

    def _run_alone(self, followed: Followed, tokens: list[int]) -> None:
        """A whole pass, without a stop."""
        one = self._running[followed] = _Pass(followed, None)

        def on_routed(layer: int, experts: list[int], scores: list[float]) -> None:
            self._layer_ends(layer, 1)
            if not self._goes_on(one):
                raise _Dropped
            self._predict(followed, layer, experts, scores)

        self._model.on_routed = on_routed
        try:
            self._pass_ends(followed, self._model.forward(tokens, followed.cache))
        except _Dropped:
            pass
        except BaseException as error:  # noqa: BLE001 - the thread goes on
            self._fail(followed, error)
        finally:
            self._model.on_routed = None
            self._running.pop(followed, None)

    def _go_on(self, together: list[_Pass]) -> None:
        """Compute their experts, and each pass up to its next gate."""
        gates = [one.gate for one in together if one.gate]
        try:
            outputs = self._model.experts_of(gates) if gates else []
        except BaseException as error:  # noqa: BLE001 - other requests go on
            for one in together:
                self._fail(one.followed, error)
            return
        for one, output in zip(together, outputs, strict=True):
            self._resume(one, output)

    def _resume(self, one: _Pass, output: object) -> None:
        followed = one.followed
        if one.run is None:
            return
        try:
            one.gate = one.run.resume(output)
            if one.run.ended:
                self._pass_ends(followed, one.run.result)
        except BaseException as error:  # noqa: BLE001 - other requests go on
            self._fail(followed, error)

    def _pass_ends(self, followed: Followed, token: int) -> None:
        self._running.pop(followed, None)
        self._owner.spans.add("head", "", self._since, self._now())
        if followed.prefilled:
            followed.on_pass_ended(token)
            self._draft(followed)
        else:
            followed.on_prompt_read(token)
        self._owner.on_pass_ended(followed)

    def _drop(self, followed: Followed) -> None:
        """End its pass in flight."""
        one = self._running.pop(followed, None)
        if one is None or one.run is None or one.run.ended:
            return
        with contextlib.suppress(_Dropped, Exception):  # where it stands it may raise another error in turn
            one.run.throw(_Dropped())

    def drop(self) -> None:
        """End all passes in flight: what they hold would outlive their thread."""
        for followed in list(self._running):
            self._drop(followed)

    def _fail(self, followed: Followed, error: BaseException) -> None:
        self._drop(followed)
        followed.broken = True
        self._owner.on_pass_failed(error)
