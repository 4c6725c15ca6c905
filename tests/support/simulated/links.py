"""Links of a simulated world: the two ends of a stream, joined by two pipes of bytes in gRPC's place.

The ends are the product's own `Stream`s, with their outboxes, beats and codecs. What gRPC does is done here as far as a
node can tell: who may write when, how a stream ends in order, is cut, refused, or breaks with its peer's process.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from scheduler.errors import LinkError, ODMoEError
from support.simulated.baton import Baton, Process, Task, Violation
from wire.base import Channel, Handler, Node, Role
from wire.messages import Message
from wire.rpc import pulse
from wire.rpc.quiet_grpc import grpc
from wire.rpc.stream import EDGES, Stream, metadata_of, status_of

WINDOW_BYTES = 256
"""On the way at most; gRPC's writer waits then. As small as the messages are: a link that stalls is soon full."""
CONNECT_S, RETRY_S = 1.0, 0.1
PULSE = pulse.PULSE._replace(announced_bytes=200)
"""Outputs of a few rows are large here: they are announced, and wait behind others in the outbox."""


class Ended(grpc.RpcError, grpc.Call):  # type: ignore[misc]  # gRPC's classes have no types
    """The end of a stream, as the client's gRPC tells it."""

    def __init__(self, code: Any, details: str, metadata: Any = ()) -> None:
        super().__init__()
        self._code, self._details, self._metadata = code, details, metadata

    def code(self) -> Any:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._metadata

    def initial_metadata(self) -> Any:
        return ()

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> float:
        return 0.0

    def cancel(self) -> None:
        return None

    def add_callback(self, callback: object) -> bool:
        return False


@dataclass
class Way:
    """One direction of a node's link. It outlasts streams."""

    delay_s: float = 0.0002
    bytes_per_s: float = 125e6
    stalled: bool = False
    """Nothing arrives. What was sent meanwhile arrives later, if the stream is still there."""
    waiting: deque[Task] = field(default_factory=deque)
    """Readers and writers."""


class Pipe:
    """One direction of one stream. The last thing that arrives is None, an end in order, or an error."""

    def __init__(self, baton: Baton, way: Way) -> None:
        self._baton, self._way = baton, way
        self._coming: deque[tuple[float, bytes | Exception | None]] = deque()
        self._bytes = 0
        self._free_at = 0.0
        self._broken: Exception | None = None

    def write(self, data: bytes | Exception | None) -> None:
        """Waits while the window is full. What is written to a broken pipe is lost."""
        size = len(data) if isinstance(data, bytes) else 0
        while size and self._bytes and self._bytes + size > WINDOW_BYTES and self._broken is None:
            self._baton.wait(self._way.waiting, None)
        if self._broken is not None:
            return
        now, way = self._baton.now, self._way
        self._free_at = max(now, self._free_at) + size / way.bytes_per_s
        self._coming.append((self._free_at + way.delay_s, data))
        self._bytes += size
        self._baton.wake_all(way.waiting)

    def break_off(self, error: Exception) -> None:
        """The reader gets an error, now."""
        self._broken = self._broken or error
        self._baton.wake_all(self._way.waiting)

    def __iter__(self) -> Iterator[bytes]:
        while True:
            if self._broken is not None:
                raise self._broken
            if not self._coming or self._way.stalled:
                self._baton.wait(self._way.waiting, None)
                continue
            at, data = self._coming[0]
            if at > self._baton.now:
                self._baton.wait(self._way.waiting, at - self._baton.now)
                continue
            self._coming.popleft()
            if data is None:
                return
            if isinstance(data, Exception):
                self._broken = data
                continue
            self._bytes -= len(data)
            self._baton.wake_all(self._way.waiting)
            yield data


@dataclass
class Address:
    """Where a node is reached. Its process changes with each start; None: it does not run."""

    role: Role
    there: Way = field(default_factory=Way)
    back: Way = field(default_factory=Way)
    process: Process | None = None
    node: Node | None = None
    tamper: Callable[[Channel], Channel] = lambda channel: channel
    """What stands between the node and its stream."""

    @property
    def ways(self) -> tuple[Way, Way]:
        return self.there, self.back


class Order:
    """Of the messages that a node has sent on a stream, seen from its end and from the main node's."""

    def __init__(self, baton: Baton, channel: Channel) -> None:
        self._baton, self._channel = baton, channel
        self._steps = itertools.count()
        self._sent: list[_Sent] = []
        """And not yet received."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def send(self, *messages: Message) -> None:
        began = next(self._steps)
        sent = [_Sent(_key(message), began) for message in messages]
        self._sent += sent
        self._channel.send(*messages)
        ended = next(self._steps)
        for one in sent:
            one.ended = ended

    def received(self, message: Message) -> None:
        """The world ends if one is still to come that was sent before it by the same call, or by one that had ended."""
        key = _key(message)
        at = next((at for at, one in enumerate(self._sent) if one.key == key), None)
        if at is None:
            self._baton.fail(Violation(f"a message is received that was not sent, or once more: {key}"))
            return
        one = self._sent.pop(at)
        earlier = (other for other in self._sent[:at] if other.began == one.began or other.ended < one.began)
        before = next(earlier, None)
        if before is not None:
            self._baton.fail(Violation(f"a message has overtaken another: {key} came before {before.key}"))


@dataclass
class _Sent:
    key: tuple[Any, ...]
    began: int
    """The call of `send`."""
    ended: float = math.inf


def _key(message: Message) -> tuple[Any, ...]:
    return type(message).__name__, *(
        value for name in message.__slots__ if isinstance(value := getattr(message, name), int | str)
    )


class _Watched:
    """The main node's handler."""

    def __init__(self, handler: Handler, order: Order) -> None:
        self._handler, self._order = handler, order
        self.on_close = handler.on_close

    def on_message(self, message: Message) -> None:
        self._order.received(message)
        self._handler.on_message(message)


class Call:
    """One stream between the main node's process and a node."""

    def __init__(self, baton: Baton, address: Address, client: Process, name: str) -> None:
        assert address.process is not None
        self._baton, self._address, self._name = baton, address, name
        self._client, self._server = client, address.process
        self._there, self._back = Pipe(baton, address.there), Pipe(baton, address.back)
        edge = EDGES[address.role]
        self.stream = Stream(edge.to_node, edge.from_node, f"the {name}", self._cut_by_client, PULSE)
        self._edge = edge
        self._order: Order | None = None
        self._accepted: deque[Task] = deque()
        self.refusal: Exception | None = None
        self.is_accepted = False
        self._server.on_killed.append(self._on_server_killed)

    def open(self, node: Node, handler: Handler) -> None:
        """Raises LinkError, or the node's refusal."""
        spawn, baton = self._baton.spawn, self._baton
        spawn(f"{self._name}-serve", self._server, lambda: self._serve(node))
        if not self.is_accepted and self.refusal is None:
            baton.wait(self._accepted, CONNECT_S)
        if self.refusal is not None:
            raise self.refusal
        if not self.is_accepted:
            self._cut_by_client()
            raise LinkError(f"cannot reach {self._name} within {CONNECT_S:g} s")
        spawn(f"{self._name}-read", self._client, lambda: self._read(handler))
        spawn(f"{self._name}-write", self._client, self._write)

    # --- the main node's side -----------------------------------------------------------------------------------

    def _read(self, handler: Handler) -> None:
        assert self._order is not None
        self.stream.read(iter(self._back), _Watched(handler, self._order))
        self._cut_by_client()

    def _write(self) -> None:
        for data in self.stream.outgoing():
            self._there.write(data)
        self._there.write(None)

    def _cut_by_client(self) -> None:
        code = grpc.StatusCode.CANCELLED
        self._back.break_off(Ended(code, "Locally cancelled by application!"))
        self._there.write(grpc.RpcError())

    # --- the node's side ----------------------------------------------------------------------------------------

    def _serve(self, node: Node) -> None:
        edge = self._edge
        stream = Stream(
            edge.from_node, edge.to_node, "the client at ipv4:10.0.0.1", self._cut_by_server, PULSE, self._back.write
        )
        self._order = Order(self._baton, stream)
        try:
            handler = node.accept(self._address.tamper(self._order))
        except ODMoEError as error:
            self.refusal = error
            self._baton.wake_all(self._accepted)
            return
        self.is_accepted = True
        self._baton.wake_all(self._accepted)
        self._baton.spawn(f"{self._name}-hear", self._server, lambda: self._hear(stream, handler))
        for data in stream.outgoing():
            self._back.write(data)
        if stream.fault is not None:
            self._back.write(Ended(*status_of(stream.fault), metadata_of(stream.fault)))
        self._back.write(None)
        self._there.break_off(grpc.RpcError())

    def _hear(self, stream: Stream, handler: Handler) -> None:
        stream.read(iter(self._there), handler)

    def _cut_by_server(self) -> None:
        self._there.break_off(grpc.RpcError())
        self._back.write(Ended(grpc.StatusCode.CANCELLED, "CANCELLED"))

    def _on_server_killed(self) -> None:
        """Its kernel says so, as far as the link passes anything."""
        self._back.write(Ended(grpc.StatusCode.UNAVAILABLE, "Socket closed"))
        self._there.break_off(grpc.RpcError())


def connect(baton: Baton, address: Address, client: Process, name: str, handler: Handler) -> Channel:
    """As `wire.rpc.client.connect`."""
    end = baton.now + CONNECT_S
    while baton.now < end:
        if address.process is not None and address.node is not None and not any(way.stalled for way in address.ways):
            baton.sleep(2 * address.there.delay_s + 2 * address.back.delay_s)
            if address.process is not None and address.node is not None:
                call = Call(baton, address, client, name)
                call.open(address.node, handler)
                return call.stream
        baton.sleep(RETRY_S)
    raise LinkError(f"cannot reach {name} within {CONNECT_S:g} s; check that it runs")
