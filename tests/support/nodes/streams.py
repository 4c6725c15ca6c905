"""Both ends of a stream for tests of what carries it: a node that echoes, and a handler that keeps what it is told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from scheduler.errors import ODMoEError
from wire import inprocess
from wire.base import Channel, Handler, Node
from wire.messages import AskUsage, Compute, Computed, Load, Loaded, Message, WorkerUsage
from wire.rpc.client import connect
from wire.rpc.pulse import Pulse
from wire.rpc.server import GrpcServer

WAIT_S = 30.0
"""No test takes this long: whoever waits longer hangs."""

PATIENT = Pulse(lost_after_s=60)
"""Beats as usual, but nobody is lost for want of a turn on a busy machine."""


class Recorder:
    """A handler that keeps what it is told, and what it should not have been told once the stream was over."""

    def __init__(self) -> None:
        self.got: SimpleQueue[Message] = SimpleQueue()
        self.ends: list[ODMoEError | None] = []
        self.late: list[Message] = []
        self.over = threading.Event()

    def on_message(self, message: Message) -> None:
        if self.over.is_set():
            self.late.append(message)
        self.got.put(message)

    def on_close(self, error: ODMoEError | None) -> None:
        self.ends.append(error)
        self.over.set()

    def take(self, n: int) -> list[Message]:
        return [self.got.get(timeout=WAIT_S) for _ in range(n)]

    def end(self) -> ODMoEError | None:
        """The argument of the one call of `on_close`, waited for."""
        assert self.over.wait(WAIT_S), f"on_close was not called within {WAIT_S:g} s"
        self.check()
        return self.ends[0]

    def check(self) -> None:
        """Raises AssertionError if it was closed twice, or heard anything after it was closed."""
        assert len(self.ends) <= 1, f"closed more than once: {self.ends}"
        assert not self.late, f"messages after on_close: {self.late}"


class Answering(Recorder):
    """The node's end of one stream: `Compute` -> `Computed`, `Load` -> `Loaded`, `AskUsage` -> `WorkerUsage`."""

    def __init__(self, reply: Channel) -> None:
        super().__init__()
        self.reply = reply

    def on_message(self, message: Message) -> None:
        super().on_message(message)
        match message:
            case Compute():
                self.reply.send(Computed(message.call_id, message.hidden, 0.5))
            case Load():
                self.reply.send(Loaded(message.load_id, 10, 0.25))
            case AskUsage():
                self.reply.send(WorkerUsage(1, 2, 3, 4))


class Listening(Recorder):
    """The node's end of one stream, which answers nothing by itself."""

    def __init__(self, reply: Channel) -> None:
        super().__init__()
        self.reply = reply


class EchoNode:
    """A node that hands each stream to a handler made by `make`; `streams` keeps them."""

    def __init__(self, make: Callable[[Channel], Any] = Answering) -> None:
        self.make = make
        self.streams: list[Any] = []

    def accept(self, reply: Channel) -> Handler:
        handler: Handler = self.make(reply)
        self.streams.append(handler)
        return handler

    def close(self) -> None:
        pass


class Kit:
    """Serves nodes and connects to them, closes what it opened, then checks that every stream ended once.

    A context manager. `serve` and `connect` take what `GrpcServer` and `wire.rpc.client.connect` do, with another
    default: both ends are `PATIENT`, and a node is waited for.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._nodes: list[Node] = []
        self._handlers: list[Handler] = []

    def __enter__(self) -> Kit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()
        if error is not None:
            return
        there = (each for node in self._nodes if isinstance(node, EchoNode) for each in node.streams)
        for handler in (*self._handlers, *there):
            if isinstance(handler, Recorder):
                handler.end()

    def serve(self, node: Node | None = None, **settings: Any) -> GrpcServer:
        """Over gRPC, as a worker."""
        node = node or EchoNode()
        server = GrpcServer(node, "worker", **({"pulse": PATIENT} | settings))
        self._nodes.append(node)
        self._stack.callback(server.close, 0.5)
        return server

    def connect(self, address: str, handler: Handler, **settings: Any) -> Channel:
        """Over gRPC, to a worker unless `kind` is given."""
        defaults: dict[str, Any] = {"kind": "worker", "deadline_s": WAIT_S, "pulse": PATIENT}
        return self._opened(connect(address, handler=handler, **(defaults | settings)), handler)

    def connect_in_process(self, node: Node, handler: Handler) -> Channel:
        self._nodes.append(node)
        return self._opened(inprocess.connect(node, handler), handler)

    def _opened(self, channel: Channel, handler: Handler) -> Channel:
        self._handlers.append(handler)
        self._stack.callback(channel.close)
        return channel
