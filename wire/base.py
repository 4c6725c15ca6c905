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


class Channel(Protocol):
    """One direction of a stream. Messages arrive in the order in which they were sent."""

    def send(self, message: Message) -> None:
        """Hand a message over; does not wait for the peer to read it.

        A node's small answer may be written at once: then this waits until the link has taken it, at most until the
        peer counts as lost. Raises `LinkError` when the stream is closed or its queue is full.
        """

    def close(self) -> None:
        """End the stream. The peer's handler sees `on_close(None)`. Closing twice does nothing."""


class Handler(Protocol):
    """What a node does with what arrives.

    `on_message` must return soon (hand long work to a thread of your own) and may be called from any one thread at
    a time. `on_close` is called once, last; `error` is None when the peer closed in peace.
    """

    def on_message(self, message: Message) -> None: ...

    def on_close(self, error: ODMoEError | None) -> None: ...


class Node(Protocol):
    """A worker or a shadow, as a transport serves it."""

    def accept(self, reply: Channel) -> Handler:
        """A peer has opened a stream: answers go to `reply`, what it says goes to the handler returned."""

    def close(self) -> None:
        """Stop the node's threads and free what it holds."""
