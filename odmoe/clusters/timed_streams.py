"""A stream whose messages arrive when they would over another network: each says when, and is kept until then.

The stream itself may take a part of that time, which then is not added to it; where it takes more, the message is late
by the rest. Times are those of the sender's `scheduler.emulation.clock`. Another machine's clock says nothing here: of
its messages only how long they are to take is known, which counts from when they came.
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
from wire.base import Channel, Handler, Node
from wire.messages import Align, CloseRequest, Compute, Computed, Message, OpenRequest, Prediction, Stamped
from wire.tracing import machine
from wire.traffic import Traffic, traffic_of

_machine = cache(machine)
_log = logging.getLogger(__name__)


class Way:
    """What travels takes no time: a node's end of its stream. The main node's end knows the links."""

    def leaves(self, message: Message, at: float) -> float:
        """When a message that is sent at `at` arrives, as far as this end knows."""
        return at

    def comes(self, message: Message, at: float) -> float:
        """When a message that would be here at `at` arrives."""
        return at

    def heard(self, message: Message, at: float) -> None:
        """It is here, and would be at `at`."""

    def ended(self) -> None:
        """A stream is over."""


class MainWay(Way):
    """The main node's end of its streams, all of which share `links`.

    What counts is how many rows, not how many bytes: the model may be smaller than the profile's. Of an alignment the
    tensors of four dimensions count, two of which are a layer's keys and values. `owed`: told what the shadow is told,
    and what it says.
    """

    def __init__(self, links: MainLinks, owed: ExpectedPredictions) -> None:
        self._links = links
        self._owed = owed

    def leaves(self, message: Message, at: float) -> float:
        if isinstance(message, Compute):
            return self._links.sent(at, message.hidden.shape[0])
        if isinstance(message, Align):
            rows = sum(tensor.shape[2] for tensor in message.kv if len(tensor.shape) == 4) / 2
            at = self._links.aligned(at, rows)
            if not message.more:
                self._owed.announced(message.request, message.step, at)
        elif isinstance(message, OpenRequest):
            self._owed.opened(message.request, len(message.prompt) - message.first_step)
        elif isinstance(message, CloseRequest):
            self._owed.closed(message.request)
        return at

    def heard(self, message: Message, at: float) -> None:
        if isinstance(message, Prediction):
            self._owed.predicted(message.request, message.position, message.layer, at)

    def ended(self) -> None:
        self._owed.give_up()

    def comes(self, message: Message, at: float) -> float:
        if isinstance(message, Computed):
            return self._links.answered(at, message.output.shape[0])
        if isinstance(message, Prediction):
            return self._links.predicted(at)
        return at


class TimedChannel:
    """Around any `Channel`: says of each message when it is due."""

    def __init__(self, inner: Channel, way: Way, time: Emulation) -> None:
        self._inner = inner
        self._way = way
        self._time = time

    @property
    def traffic(self) -> Traffic | None:
        """That of the stream inside."""
        return traffic_of(self._inner)

    @property
    def peer(self) -> str:
        return getattr(self._inner, "peer", "")

    def send(self, message: Message) -> None:
        """Raises as the stream inside."""
        due = self._way.leaves(message, self._time.now())
        self._inner.send(Stamped(due, self._time.clock(), _machine(), message))

    def close(self) -> None:
        self._inner.close()


class TimedHandler:
    """Around any `Handler`: hands messages on when they are due, in the order in which they came. One that is due
    before another that came first waits for that one, but counts as having arrived when it was due.

    `cut`: ends the stream, where the handler fails and cannot do that itself.
    """

    def __init__(self, inner: Handler, way: Way, time: Emulation, cut: Callable[[], object] = lambda: None) -> None:
        self._inner = inner
        self._way = way
        self._time = time
        self._cut = cut
        self._lock = threading.Lock()
        self._queued = self._last = -math.inf
        self._over = False

    def on_message(self, message: Message) -> None:
        if not isinstance(message, Stamped):
            self._inner.on_message(message)
            return
        here = message.machine == _machine()
        at = message.due if here else self._time.clock() + message.due - message.sent
        content = message.message
        with self._lock:  # in one process, several threads of a node may send
            self._queued = queued = max(self._queued, at)
        self._way.heard(content, at)
        self._time.agenda.at(queued, lambda: self._enters(content, at), at)
        self._time.agenda.notify()

    def _enters(self, message: Message, at: float) -> None:
        """Only now does it take its place on a link that several streams share."""
        if self._over:
            return
        try:
            due = self._way.comes(message, at)
        except Exception as error:  # noqa: BLE001 - as where a stream is read: it ends, and both ends hear of it
            self._fail(error)
            return
        self._last = max(self._last, due)
        self._time.agenda.at(self._last, lambda: self._arrives(message), due)

    def _arrives(self, message: Message) -> None:
        if self._over:
            return
        try:
            self._inner.on_message(message)
        except Exception as error:  # noqa: BLE001 - as where a stream is read: it ends, and both ends hear of it
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        _log.error("handling a message failed", exc_info=error)
        ours = error if isinstance(error, ODMoEError) else None
        self._end(ours or LinkError(f"handling a message failed: {error!r}; the stream was ended"))
        self._cut()

    def on_close(self, error: ODMoEError | None) -> None:
        """Behind all that is on its way."""
        now = self._time.clock()
        self._way.ended()
        self._time.agenda.at(max(self._queued, now), lambda: self._leaves(error, now))

    def _leaves(self, error: ODMoEError | None, now: float) -> None:
        self._time.agenda.at(max(self._last, now), lambda: self._end(error))

    def _end(self, error: ODMoEError | None) -> None:
        if not self._over:
            self._over = True
            self._inner.on_close(error)


class TimedNode:
    """Around any `Node`: its end of every stream is timed."""

    def __init__(self, node: Node, time: Emulation) -> None:
        self._node = node
        self._time = time

    def accept(self, reply: Channel) -> Handler:
        handler = self._node.accept(TimedChannel(reply, Way(), self._time))
        return TimedHandler(handler, Way(), self._time, reply.close)

    def close(self) -> None:
        self._node.close()
