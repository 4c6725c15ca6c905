"""The edge between nodes: one interface, two transports (in-process and gRPC).

client side                                   server side
connect(address, handler) -> Channel          Node.accept(reply: Channel) -> Handler
channel.send(message)              ------->   handler.on_message(message)
handler.on_message(message)        <-------   reply.send(message)
handler.on_close(error)            <- end ->  handler.on_close(error)
"""

from __future__ import annotations

from typing import Literal, Protocol

from scheduler.errors import ODMoEError
from wire.messages import Message

Role = Literal["worker", "shadow"]
"""What a node that the main node connects to is."""

Served = Literal["worker", "shadow", "stage"]
"""What a node that is connected to is. A stage is some of a shadow's layers, to which the shadow connects."""


class Channel(Protocol):
    """One direction of a stream. Messages arrive in the order in which they were sent."""

    def send(self, *messages: Message) -> None:
        """Queue messages, without waiting for the peer to read them. Those of one call may travel as one.

        A node's small answer may be written at once. This then blocks until the link has taken it, at most until the
        peer counts as lost. Raises `LinkError` if the stream is closed or its queue is full.
        """

    def close(self) -> None:
        """End the stream. The peer's handler sees `on_close(None)`. Closing twice does nothing."""


def is_in_process(channel: Channel) -> bool:
    """Whether the other end is a node of this process, so that its messages need no bounds, credit and checksums. A
    channel has to say so (`in_process`); whatever does not is taken for another process's."""
    return bool(getattr(channel, "in_process", False))


class Handler(Protocol):
    """Receives one direction of a stream.

    `on_message` must return soon: give long work to another thread. It may be called from any thread, but from one at
    a time. `on_close` is called once, last; `error` is None if the peer closed the stream in order.
    """

    def on_message(self, message: Message) -> None: ...

    def on_close(self, error: ODMoEError | None) -> None: ...


class Node(Protocol):
    """A worker or a shadow, as a transport serves it."""

    def accept(self, reply: Channel) -> Handler:
        """A peer has opened a stream. Returns the handler of its messages; answers go to `reply`."""

    def close(self) -> None:
        """Stop the node's threads and free what it holds."""
