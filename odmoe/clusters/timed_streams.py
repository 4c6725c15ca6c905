"""Streams with the message times of another network: each message carries its due time, and the receiver holds it
until then.

The time on the real stream is part of that time, not added to it. If the real stream takes longer, the message is late
by the difference. Times are those of the sender's `scheduler.emulation.clock`. The clock of another machine is not
comparable, so a message from there is due its duration after it arrives.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from functools import cache

from scheduler.emulation.clock import Emulation
from scheduler.emulation.expected_predictions import ExpectedPredictions
from scheduler.errors import LinkError, ODMoEError
from scheduler.timing.links import MainLinks
from wire.base import Channel, Handler, Node, is_in_process
from wire.messages import (
    Align,
    CloseRequest,
    Compute,
    Computed,
    Draft,
    Message,
    OpenRequest,
    Prediction,
    ShadowProgress,
    Stamped,
)
from wire.tracing import machine
from wire.traffic import Traffic, traffic_of

_machine = cache(machine)
_log = logging.getLogger(__name__)


class StreamEnd:
    """A node's end of its stream. Messages take no time here, because the main node's end models the links."""

    def on_sent(self, message: Message, at: float) -> float:
        """A message leaves at `at`. Returns its arrival, without the time that the other end adds."""
        return at

    def arrives(self, message: Message, at: float) -> float:
        """A message is due at `at` according to its sender. Returns its arrival."""
        return at

    def on_received(self, message: Message, at: float) -> None:
        """A message has arrived, perhaps before it is due at `at`."""

    def on_closed(self) -> None:
        """The stream has ended."""


class MainStreamEnd(StreamEnd):
    """The main node's end of its streams, which all share `links`.

    Durations follow from the number of rows, not of bytes, because the model may be smaller than the profile's. The
    rows of an alignment are those of its tensors with four dimensions, two per layer: keys and values.
    """

    def __init__(self, links: MainLinks, expected: ExpectedPredictions) -> None:
        self._links = links
        self._expected = expected

    def on_sent(self, message: Message, at: float) -> float:
        if isinstance(message, Compute):
            return self._links.send_rows(at, message.hidden.shape[0])
        if isinstance(message, Align):
            rows = sum(tensor.shape[2] for tensor in message.kv if len(tensor.shape) == 4) / 2
            at = self._links.send_alignment(at, rows)
            if not message.more:
                self._expected.on_announced(message.request, message.step, at)
        elif isinstance(message, OpenRequest):
            self._expected.on_opened(message.request)
        elif isinstance(message, CloseRequest):
            self._expected.on_closed(message.request)
        return at

    def arrives(self, message: Message, at: float) -> float:
        if isinstance(message, Computed):
            return self._links.send_outputs(at, message.output.shape[0])
        if isinstance(message, Prediction | Draft):
            return self._links.send_prediction(at)
        return at

    def on_received(self, message: Message, at: float) -> None:
        if isinstance(message, Prediction | Draft):
            self._expected.on_progress(message.request, None, at)
        elif isinstance(message, ShadowProgress):
            self._expected.on_progress(message.request, message.step if message.idle else None, at)

    def on_closed(self) -> None:
        self._expected.give_up()


class TimedChannel:
    """Around any `Channel`: adds each message's due time."""

    def __init__(self, inner: Channel, end: StreamEnd, emulation: Emulation) -> None:
        self._inner = inner
        self._end = end
        self._emulation = emulation

    @property
    def traffic(self) -> Traffic | None:
        """The inner stream's."""
        return traffic_of(self._inner)

    @property
    def peer(self) -> str:
        return getattr(self._inner, "peer", "")

    @property
    def in_process(self) -> bool:
        return is_in_process(self._inner)

    def send(self, *messages: Message) -> None:
        """Raises what the inner stream raises."""
        for message in messages:
            due = self._end.on_sent(message, self._emulation.now())
            self._inner.send(Stamped(due, self._emulation.clock(), _machine(), message))

    def close(self) -> None:
        self._inner.close()


class TimedHandler:
    """Around any `Handler`: hands messages on when they are due, in the order of their arrival.

    A message that is due before one that arrived earlier is delivered after it, but counts from its own due time.
    `cut`: ends the stream if the inner handler fails and cannot end it itself.
    """

    def __init__(
        self, inner: Handler, end: StreamEnd, emulation: Emulation, cut: Callable[[], object] = lambda: None
    ) -> None:
        self._inner = inner
        self._end = end
        self._emulation = emulation
        self._cut = cut
        self._lock = threading.Lock()
        self._queued = self._last = -math.inf
        self._over = False

    def on_message(self, message: Message) -> None:
        if not isinstance(message, Stamped):
            self._inner.on_message(message)
            return
        same_machine = message.machine == _machine()
        at = message.due if same_machine else self._emulation.clock() + message.due - message.sent
        content = message.message
        with self._lock:  # in one process, several threads of a node may send
            self._queued = queued = max(self._queued, at)
        self._end.on_received(content, at)
        self._emulation.agenda.at(queued, lambda: self._arrive(content, at), at)
        self._emulation.agenda.notify()

    def _arrive(self, message: Message, at: float) -> None:
        """At its due time the message takes its place on the link, which several streams share."""
        if self._over:
            return
        try:
            due = self._end.arrives(message, at)
        except Exception as error:  # noqa: BLE001 - as in a real stream: it ends, with the error at both ends
            self._fail(error)
            return
        self._last = max(self._last, due)
        self._emulation.agenda.at(self._last, lambda: self._deliver(message), due)

    def _deliver(self, message: Message) -> None:
        if self._over:
            return
        try:
            self._inner.on_message(message)
        except Exception as error:  # noqa: BLE001 - as in a real stream: it ends, with the error at both ends
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        _log.error("handling a message failed", exc_info=error)
        known = error if isinstance(error, ODMoEError) else None
        self._finish(known or LinkError(f"handling a message failed: {error!r}; the stream was ended"))
        self._cut()

    def on_close(self, error: ODMoEError | None) -> None:
        """Close the inner handler after all messages in flight."""
        now = self._emulation.clock()
        self._end.on_closed()
        self._emulation.agenda.at(max(self._queued, now), lambda: self._close_after_messages(error, now))

    def _close_after_messages(self, error: ODMoEError | None, now: float) -> None:
        self._emulation.agenda.at(max(self._last, now), lambda: self._finish(error))

    def _finish(self, error: ODMoEError | None) -> None:
        if not self._over:
            self._over = True
            self._inner.on_close(error)


class TimedNode:
    """Around any `Node`: its end of every stream is timed."""

    def __init__(self, node: Node, emulation: Emulation) -> None:
        self._node = node
        self._emulation = emulation

    def accept(self, reply: Channel) -> Handler:
        handler = self._node.accept(TimedChannel(reply, StreamEnd(), self._emulation))
        return TimedHandler(handler, StreamEnd(), self._emulation, reply.close)

    def close(self) -> None:
        self._node.close()
