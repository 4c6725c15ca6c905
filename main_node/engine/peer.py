"""One peer, as the main node sees it: its stream, and questions that wait for an answer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar

from scheduler import errors
from scheduler import types as t
from scheduler.errors import DeadlineError, LinkError, ODMoEError, ProtocolError
from scheduler.held import ranges_from
from scheduler.model_limits import ModelLimits
from scheduler.one_line import one_line
from scheduler.policies.precision import FORMS, FULL
from wire import runtime
from wire.base import Channel, Handler, is_in_process
from wire.bounds.check import Bounds
from wire.credit import RowCredit
from wire.messages import (
    AskUsage,
    Echo,
    Failed,
    Held,
    Hello,
    Message,
    Prediction,
    ShadowReady,
    ShadowUsage,
    Stamped,
    TraceRecords,
    WorkerReady,
    WorkerUsage,
)
from wire.traffic import Traffic, traffic_of

ECHOES = 5
ECHO_S = 0.5
"""How often a round trip is measured, and how long all of them may take."""

_Telling = TypeVar("_Telling", bound="WorkerReady | ShadowReady | Failed")
_ANSWERS = (WorkerReady, ShadowReady, WorkerUsage, ShadowUsage, TraceRecords, Echo)


def worker_of(number: int, ready: WorkerReady) -> t.WorkerJoined:
    """The event of a worker that is ready. Raises ProtocolError for forms or costs that cannot be."""
    costs = ready.forms, ready.form_load_s, ready.form_restore_s, ready.form_fits
    if len({len(values) for values in costs}) > 1 or not set(ready.forms) <= set(FORMS):
        raise ProtocolError(
            f"worker {number} has the forms {ready.forms}, and {', '.join(str(len(values)) for values in costs[1:])} "
            f"costs of them; allowed: {FORMS}, each with all costs"
        )
    if ready.forms and (FULL not in ready.forms or len(set(ready.forms)) < len(ready.forms)):
        raise ProtocolError(
            f"worker {number} has the forms {ready.forms}; allowed: the full form {FULL!r} and smaller ones, each of "
            "them once"
        )
    seconds = (*ready.form_load_s, *ready.form_restore_s)
    if not all(math.isfinite(cost) and cost >= 0 for cost in seconds):
        raise ProtocolError(f"worker {number} has forms that cost {seconds} seconds; allowed: finite, at least 0")
    load_s = ready.slot_bytes / ready.load_bytes_per_s if ready.load_bytes_per_s > 0 else 0.0
    forms = tuple(map(t.FormCost, *costs))
    own = ready.call_s, ready.row_s, forms, ready.host_slots, ready.host_load_s
    return t.WorkerJoined(number, ready.slots, load_s, *own, held_of(ready))


def held_of(message: WorkerReady | Held) -> tuple[t.HeldRange, ...] | None:
    """The experts of a worker's part of the store; None: it has all."""
    return ranges_from(message.held) if message.in_parts else None


def prediction_of(message: Message, shape: t.ModelShape, on_prediction: Callable[[Prediction], None]) -> t.Predicted:
    """The event of a shadow's prediction, for which `on_prediction` is called. ClusterError for others."""
    if isinstance(message, Failed):
        raise errors.ClusterError(f"{message.error}: {message.message}")
    if not isinstance(message, Prediction):
        raise ProtocolError(f"it sent {type(message).__name__}, which a shadow never sends")
    if message.layer not in shape.layers or not all(0 <= e < shape.experts for e in message.experts):
        experts = f"experts {message.experts} of layer {message.layer}"
        raise ProtocolError(f"it predicts {experts}, which the model does not have")
    on_prediction(message)
    return t.Predicted(message.request, message.position, message.layer, message.experts)


def _with_shown_texts(message: _Telling) -> _Telling:
    """With its texts as they may be shown, in logs, reports and tables."""
    values = {one.name: getattr(message, one.name) for one in fields(message)}
    texts: Any = {name: one_line(value) for name, value in values.items() if isinstance(value, str)}
    return replace(message, **texts)


class PeerHandler:
    """`on_event`: called with messages that answer no question. `on_lost`: called when the stream has ended. `limits`:
    of the model; a peer whose message exceeds them is lost."""

    def __init__(
        self,
        name: str,
        on_event: Callable[[Message], None],
        on_lost: Callable[[ODMoEError | None], None],
        limits: ModelLimits | None = None,
    ) -> None:
        self.name = name
        self._bounds: Bounds | None = Bounds(limits or ModelLimits())
        """None for a node of this process, which nothing stands between."""
        self._on_event = on_event
        self._on_lost = on_lost
        self.credit: RowCredit | None = RowCredit(0)
        """None likewise."""
        self._channel: Channel | None = None
        self.traffic: Traffic | None = None
        """Bytes that the stream has carried; None in one process, where messages are passed as objects."""
        self.early: dict[type, Message] = {}
        """What it has said of itself before it was in use, the last of each kind."""
        self._answers: dict[type, Message] = {}
        self._usage: WorkerUsage | ShadowUsage | None = None
        """What it said last."""
        self._usage_asked = False
        self._error: ODMoEError | None = None
        self._ended = False
        self._changed = runtime.Condition()

    def open(self, connect: Callable[[Handler], Channel], hello: Hello, deadline_s: float) -> Message:
        """Connect, say Hello, return the answer. Raises the peer's refusal, LinkError or DeadlineError."""
        self._channel = connect(self)
        self.traffic = traffic_of(self._channel)
        if is_in_process(self._channel):
            self._bounds = self.credit = None
        answer = self.ask(hello, (WorkerReady, ShadowReady), deadline_s)
        if answer is None:
            ended = LinkError(f"{self.name} closed its stream before it was ready") if self._ended else None
            self.close()
            raise self._error or ended or DeadlineError(f"{self.name} did not answer within {deadline_s:g} s")
        return answer

    def ask(self, question: Message, kind: type | tuple[type, ...], deadline_s: float) -> Message | None:
        """Send and wait for an answer of that kind; None when it did not come."""
        kinds = kind if isinstance(kind, tuple) else (kind,)
        self.put(question, *kinds)
        return self.take(kinds, deadline_s)

    def put(self, question: Message, *kinds: type) -> None:
        """Send a question whose answer, of one of these kinds, `take` waits for."""
        with self._changed:
            for kind in kinds:
                self._answers.pop(kind, None)
        try:
            self.send(question)
        except LinkError as error:
            self._error = self._error or error

    def take(self, kinds: tuple[type, ...], deadline_s: float) -> Message | None:
        """Wait for the answer. None when it did not come."""

        def answer() -> Message | None:
            return next((self._answers[kind] for kind in kinds if kind in self._answers), None)

        with self._changed:
            self._changed.wait_for(lambda: answer() or self._ended or self._error, deadline_s)
            return answer()

    def ask_usage(self) -> None:
        """Ask what the node holds, for `last_usage`, unless it owes that answer already. A stream that has ended is not
        asked."""
        with self._changed:
            if self._usage_asked or self._ended:
                return
            self._usage_asked = True
        with contextlib.suppress(LinkError):
            self.send(AskUsage())

    def last_usage(self, first_s: float) -> WorkerUsage | ShadowUsage | None:
        """What the node said last. None: nothing, within `first_s` of now."""
        with self._changed:
            self._changed.wait_for(lambda: self._usage or self._ended or self._error, first_s)
            return self._usage

    def round_trip(self) -> float | None:
        """Seconds that a small message takes there and back: the best of `ECHOES`. None where no answer came."""
        end, best = runtime.monotonic() + ECHO_S, 0.0
        for number in range(1, ECHOES + 1):
            sent = runtime.monotonic()
            answer = self.ask(Echo(number), Echo, end - sent)
            if not isinstance(answer, Echo) or answer.number != number:
                break
            seconds = runtime.monotonic() - sent
            best = min(seconds, best or seconds)
        return best or None

    def send(self, *messages: Message) -> None:
        """Raises LinkError, or ProtocolError for a message that cannot be encoded; then none is sent."""
        if self._channel is None:
            raise LinkError(f"{self.name} is not connected")
        self._channel.send(*messages)

    def on_message(self, message: Message) -> None:
        if isinstance(message, Stamped):
            self.on_close(ProtocolError(f"{self.name} keeps a profile's times, the main node does not; both must"))
            return
        if self._bounds is not None:
            try:
                self._bounds.check(message)
            except ProtocolError as error:
                self._refuse(error)
                return
        if isinstance(message, WorkerReady | ShadowReady | Failed):
            message = _with_shown_texts(message)
        if isinstance(message, WorkerReady) and self._bounds is not None:
            limits = replace(self._bounds.limits, slots=message.slots, slot_bytes=message.slot_bytes)
            self._bounds = Bounds(limits)
            self.credit = RowCredit(message.queue_bytes)
        if isinstance(message, _ANSWERS):
            with self._changed:
                self._answers[type(message)] = message
                if isinstance(message, WorkerUsage | ShadowUsage):
                    self._usage, self._usage_asked = message, False
                self._changed.notify_all()
            return
        if isinstance(message, Failed) and not (message.load_id or message.call_id or message.request):
            with self._changed:
                self._error = named_error(message)
                self._changed.notify_all()
        self._on_event(message)

    def _refuse(self, error: ProtocolError) -> None:
        """The peer is of no use any more."""
        self.on_close(ProtocolError(f"{self.name} sent a message that cannot be: {error}"))
        self.close()

    def on_close(self, error: ODMoEError | None) -> None:
        with self._changed:
            self._ended = True
            self._error = self._error or error
            self._changed.notify_all()
        self._on_lost(error)

    @property
    def has_ended(self) -> bool:
        """The stream has ended, or the peer has reported a failure of its own."""
        with self._changed:
            return self._ended or self._error is not None

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()


def ask_usage(
    workers: dict[int, PeerHandler], shadow: PeerHandler | None, deadline_s: float
) -> tuple[dict[int, WorkerUsage], ShadowUsage | None]:
    """Ask all of them at once. A node that does not answer in time is left out."""
    end = runtime.monotonic() + deadline_s
    for peer in workers.values():
        peer.put(AskUsage(), WorkerUsage)
    if shadow:
        shadow.put(AskUsage(), ShadowUsage)
    answers = {number: peer.take((WorkerUsage,), end - runtime.monotonic()) for number, peer in workers.items()}
    held = shadow.take((ShadowUsage,), end - runtime.monotonic()) if shadow else None
    known = {number: answer for number, answer in answers.items() if isinstance(answer, WorkerUsage)}
    return known, held if isinstance(held, ShadowUsage) else None


def named_error(failure: Failed) -> ODMoEError:
    """The error of our tree that the peer has named, else ClusterError."""
    kind = getattr(errors, failure.error, None)
    if isinstance(kind, type) and issubclass(kind, ODMoEError):
        return kind(failure.message)
    return errors.ClusterError(f"{failure.error}: {failure.message}")
