"""A stream whose messages arrive as late as over another network: each is held until it is due, then handed on."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from scheduler.errors import LinkError, ODMoEError
from wire.base import Channel, Handler, Node
from wire.messages import Align, Compute, Computed, Echo, Message, Prediction
from wire.traffic import Traffic, traffic_of

MAX_HELD = 4096
"""Messages that may be on their way."""

Delay = Callable[[Message], float]
"""How long a message travels, in seconds. One for each direction of a stream: it may remember what it has seen."""

_log = logging.getLogger(__name__)


class Time(Protocol):
    """What a delayed stream needs of an emulation's time: see `scheduler.emulation.Emulation`."""

    @property
    def clock(self) -> Callable[[], float]: ...

    def now(self) -> float: ...

    def adopt(self, at: float) -> None: ...


class Links(Protocol):
    """What travel costs, in seconds: see `scheduler.profile.Profile`."""

    @property
    def hop_s(self) -> float: ...

    def transfer_s(self, tokens: int) -> float: ...

    def align_s(self, rows: float) -> float: ...


def delays(links: Links) -> Delay:
    """As the simulator has it: embeddings, predictions and KV rows take their time, all else arrives at once.

    What counts is how many rows, not how many bytes: the model may be smaller than the profile's. Of an alignment the
    tensors of four dimensions count, two of which are a layer's keys and values.
    """
    rows = 0.0  # of an alignment's parts so far: they share one link

    def delay(message: Message) -> float:
        nonlocal rows
        if isinstance(message, Compute):
            return links.transfer_s(message.hidden.shape[0])
        if isinstance(message, Computed):
            return links.transfer_s(message.output.shape[0])
        if isinstance(message, Prediction):
            return links.hop_s
        if isinstance(message, Align):
            rows += sum(tensor.shape[2] for tensor in message.kv if len(tensor.shape) == 4) / 2
            seconds = links.align_s(rows)
            rows = rows if message.more else 0.0
            return seconds
        return 0.0

    return delay


class DelayedChannel:
    """Around any `Channel`. A thread of its own hands messages on, in the order in which they were sent; one that is
    due before another sent earlier waits for that one, but counts as having arrived when it was due.

    `early_s`: what the stream inside takes by itself, half of the shortest round trip that an `Echo` has told; so much
    before it is due, but not before it was sent, a message is handed to it.
    """

    def __init__(self, inner: Channel, delay: Delay, time: Time) -> None:
        self.early_s = 0.0
        self._inner = inner
        self._delay = delay
        self._time = time
        self._held: deque[tuple[float, Message]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._fault: ODMoEError | None = None
        self._thread = threading.Thread(target=self._run, name="odmoe-delay", daemon=True)
        self._thread.start()

    @property
    def traffic(self) -> Traffic | None:
        """That of the stream inside."""
        return traffic_of(self._inner)

    def hear(self, echo: Echo) -> None:
        """It travels this stream, in either direction."""
        self.early_s = echo.best_s / 2

    def send(self, message: Message) -> None:
        """Raises `LinkError` when closed or `MAX_HELD` messages are on their way, or what ended the stream."""
        with self._changed:
            if self._fault is not None:
                raise self._fault
            if self._closed:
                raise LinkError("the delayed stream is closed; connect to the node again")
            if len(self._held) >= MAX_HELD:
                raise LinkError(f"{MAX_HELD} messages are on their way; the peer does not keep up")
            if isinstance(message, Echo):
                self.hear(message)
            self._held.append((self._time.now() + self._delay(message), message))
            self._changed.notify()

    def close(self) -> None:
        """What is on its way is handed over at once, from the stream's own thread, then the stream inside is closed."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        while (message := self._next()) is not None:
            try:
                self._inner.send(message)
            except Exception as error:  # noqa: BLE001 - a dead thread would look like a slow link
                _log.debug("a delayed message could not be handed on", exc_info=True)
                self._end(error)
        self._inner.close()

    def _next(self) -> Message | None:
        """The message that has arrived next; None when there will be no more."""
        with self._changed:
            while True:
                wait_s = None
                if self._held:
                    due, message = self._held[0]
                    wait_s = due - self.early_s - self._time.clock()
                    if wait_s <= 0 or self._closed:
                        self._held.popleft()
                        self._time.adopt(due)
                        return message
                elif self._closed:
                    return None
                self._changed.wait(wait_s)

    def _end(self, error: Exception) -> None:
        with self._changed:
            self._fault = error if isinstance(error, ODMoEError) else LinkError(f"handing a message on failed: {error}")
            self._held.clear()
            self._closed = True


class DelayedNode:
    """Around any `Node`: what it answers travels as long as a `Delay` says, one made for each stream."""

    def __init__(self, node: Node, delay: Callable[[], Delay], time: Time) -> None:
        self._node = node
        self._delay = delay
        self._time = time

    def accept(self, reply: Channel) -> Handler:
        delayed = DelayedChannel(reply, self._delay(), self._time)
        return _Ending(self._node.accept(delayed), delayed)

    def close(self) -> None:
        self._node.close()


class _Ending:
    """A handler that lets its stream's thread go when the stream is over, and hear of the stream's round trip."""

    def __init__(self, handler: Handler, channel: DelayedChannel) -> None:
        self._handler = handler
        self._channel = channel

    def on_message(self, message: Message) -> None:
        if isinstance(message, Echo):
            self._channel.hear(message)
        self._handler.on_message(message)

    def on_close(self, error: ODMoEError | None) -> None:
        self._handler.on_close(error)
        self._channel.close()
