"""The contenders of roundtrip.py: servers that echo and clients that take turns, each in a process of its own."""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import grpc
import grpc.aio

from odmoe.machines.certs import ensure_certs
from scheduler.errors import ODMoEError
from wire import inprocess
from wire.base import Channel
from wire.messages import Compute, Computed, Message, Tensor
from wire.rpc.client import connect
from wire.rpc.server import GrpcServer
from wire.rpc.stream import CLIENT_OPTIONS, SERVER_OPTIONS
from wire.rpc.tls import Identity

METHOD = "/bare.Echo/Echo"
HOST = "127.0.0.1"
DEADLINE_S = 30.0
OURS, BARE, AIO, TCP, INSIDE = "ours, gRPC", "bare gRPC", "bare gRPC, aio", "TCP", "ours, in process"
OURS_TLS, BARE_TLS = "ours, gRPC, mTLS", "bare gRPC, mTLS"
CERTIFICATES = "ODMOE_ROUNDTRIP_CERTIFICATES"
"""The environment variable that tells every process where they are."""


# --- the servers, each in a process of its own -----------------------------------------------------------------


class Echo:
    """The trivial node, and its end of a stream: answers a `Compute` with its own rows."""

    def accept(self, reply: Channel) -> Echo:
        end = Echo()
        end.reply = reply
        return end

    def on_message(self, message: Message) -> None:
        if isinstance(message, Compute):
            self.reply.send(Computed(message.call_id, message.hidden, 0.0))

    def on_close(self, error: ODMoEError | None) -> None:
        pass

    def close(self) -> None:
        pass

    reply: Channel


def _echo(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    yield from requests


async def _echo_aio(requests: Any, context: Any) -> Any:
    async for request in requests:
        yield request


def _handlers(behaviour: Any) -> tuple[grpc.GenericRpcHandler, ...]:
    method = grpc.stream_stream_rpc_method_handler(behaviour)
    return (grpc.method_handlers_generic_handler("bare.Echo", {"Echo": method}),)


def _identity() -> Identity:
    """Of 127.0.0.1, for both sides."""
    return Identity.read(Path(os.environ[CERTIFICATES]) / HOST)


def _serve_ours(told: Connection, tls: bool = False) -> None:
    server = GrpcServer(Echo(), "worker", identity=_identity() if tls else None)
    told.send(server.address)
    told.recv()
    server.close(0.5)


def _serve_bare(told: Connection, tls: bool = False) -> None:
    server = grpc.server(ThreadPoolExecutor(2), handlers=_handlers(_echo), options=SERVER_OPTIONS)
    where = f"{HOST}:0"
    if tls:
        port = server.add_secure_port(where, _identity().server_credentials(lambda: None))
    else:
        port = server.add_insecure_port(where)
    server.start()
    told.send(f"{HOST}:{port}")
    told.recv()
    server.stop(0.5).wait(DEADLINE_S)


def _serve_aio(told: Connection) -> None:
    async def serve() -> None:
        server = grpc.aio.server(handlers=_handlers(_echo_aio), options=SERVER_OPTIONS)
        port = server.add_insecure_port(f"{HOST}:0")
        await server.start()
        told.send(f"{HOST}:{port}")
        await asyncio.get_running_loop().run_in_executor(None, told.recv)
        await server.stop(0.5)

    asyncio.run(serve())


def _serve_tcp(told: Connection) -> None:
    with socket.create_server((HOST, 0)) as listener:
        told.send(f"{HOST}:{listener.getsockname()[1]}")
        peer, _ = listener.accept()
        with peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            head = bytearray(4)
            while _receive(peer, memoryview(head)):
                body = bytearray(int.from_bytes(head, "big"))
                _receive(peer, memoryview(body))
                peer.sendall(head + body)


SERVERS: dict[str, Callable[[Connection], None]] = {
    OURS: _serve_ours,
    BARE: _serve_bare,
    AIO: _serve_aio,
    TCP: _serve_tcp,
    OURS_TLS: functools.partial(_serve_ours, tls=True),
    BARE_TLS: functools.partial(_serve_bare, tls=True),
}


def _receive(peer: socket.socket, into: memoryview) -> bool:
    """Fill `into`. False when the peer has closed."""
    at = 0
    while at < len(into):
        got = peer.recv_into(into[at:])
        if not got:
            return False
        at += got
    return True


# --- the clients -----------------------------------------------------------------------------------------------


class Contender(Protocol):
    """One way there and back."""

    def run(self, size: int, count: int) -> list[float]:
        """Seconds of each of `count` round trips of `size` bytes."""

    def close(self) -> None: ...


class Ours:
    """`Compute` there, `Computed` back. The answer's time is taken in `on_message`, as every handler of ours would."""

    def __init__(self, open_stream: Callable[[Any], Channel]) -> None:
        self._answers: SimpleQueue[tuple[float, Message | ODMoEError | None]] = SimpleQueue()
        self._channel = open_stream(self)

    def on_message(self, message: Message) -> None:
        self._answers.put((time.perf_counter(), message))

    def on_close(self, error: ODMoEError | None) -> None:
        self._answers.put((0.0, error))

    def run(self, size: int, count: int) -> list[float]:
        message = compute(size)
        taken = []
        for _ in range(count):
            start = time.perf_counter()
            self._channel.send(message)
            arrived, answer = self._answers.get(timeout=DEADLINE_S)
            if not isinstance(answer, Computed):
                raise RuntimeError(f"no answer to {size} bytes: {answer}")
            taken.append(arrived - start)
        if answer.output != message.hidden:
            raise RuntimeError(f"{size} bytes came back changed")
        return taken

    def close(self) -> None:
        self._channel.close()


class Bare:
    """Bytes there and back on one stream of gRPC's ordinary Python API."""

    def __init__(self, address: str, tls: bool = False) -> None:
        self._channel = (
            grpc.secure_channel(address, _identity().channel_credentials(), options=CLIENT_OPTIONS)
            if tls
            else grpc.insecure_channel(address, options=CLIENT_OPTIONS)
        )
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        open_call: Any = self._channel.stream_stream
        self._call = open_call(METHOD)(iter(self._queue.get, None))

    def run(self, size: int, count: int) -> list[float]:
        data = bytes(size)
        taken = []
        for _ in range(count):
            start = time.perf_counter()
            self._queue.put(data)
            next(self._call)
            taken.append(time.perf_counter() - start)
        return taken

    def close(self) -> None:
        self._queue.put(None)
        self._channel.close()


class BareAio:
    """The same with gRPC's asyncio API; the loop runs in this thread, during a turn only."""

    def __init__(self, address: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._open(address))

    async def _open(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
        open_call: Any = self._channel.stream_stream
        self._call = open_call(METHOD)()

    def run(self, size: int, count: int) -> list[float]:
        return self._loop.run_until_complete(self._turn(bytes(size), count))

    async def _turn(self, data: bytes, count: int) -> list[float]:
        taken = []
        for _ in range(count):
            start = time.perf_counter()
            await self._call.write(data)
            await self._call.read()
            taken.append(time.perf_counter() - start)
        return taken

    def close(self) -> None:
        self._call.cancel()
        self._loop.run_until_complete(self._channel.close())
        self._loop.close()


class Tcp:
    """A length and that many bytes there and back, blocking, no delay."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._peer = socket.create_connection((host, int(port)), DEADLINE_S)
        self._peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(self, size: int, count: int) -> list[float]:
        data, back = size.to_bytes(4, "big") + bytes(size), memoryview(bytearray(4 + size))
        taken = []
        for _ in range(count):
            start = time.perf_counter()
            self._peer.sendall(data)
            if not _receive(self._peer, back):
                raise RuntimeError("the TCP echo hung up")
            taken.append(time.perf_counter() - start)
        return taken

    def close(self) -> None:
        self._peer.close()


def compute(size: int) -> Compute:
    """A message with `size` bytes of hidden states, in memory of another's, as a torch tensor's are."""
    rows = memoryview(bytearray(size))
    return Compute(1, 0, 3, 5, Tensor("float32", (1, size // 4), rows), Tensor("float32", (1,), bytes(4)), evict=True)


# --- their processes -------------------------------------------------------------------------------------------

CLIENTS: dict[str, Callable[[str], Contender]] = {
    OURS: lambda address: Ours(lambda handler: connect(address, "worker", handler)),
    BARE: Bare,
    AIO: BareAio,
    TCP: Tcp,
    INSIDE: lambda address: Ours(lambda handler: inprocess.connect(Echo(), handler)),
    OURS_TLS: lambda address: Ours(lambda handler: connect(address, "worker", handler, identity=_identity())),
    BARE_TLS: functools.partial(Bare, tls=True),
}


def _take_turns(told: Connection, name: str, address: str) -> None:
    """A client's process: a turn for each (size, count) that it is told, until it is told None."""
    contender = CLIENTS[name](address)
    told.send(name)
    while (turn := told.recv()) is not None:
        told.send(contender.run(*turn))
    contender.close()


def answer(process: Connection) -> Any:
    if not process.poll(DEADLINE_S):
        raise RuntimeError(f"a process did not answer within {DEADLINE_S:g} s")
    return process.recv()


def _dismiss(process: Connection) -> None:
    with suppress(BrokenPipeError):  # it has gone already: its peer hung up
        process.send(None)


def contenders(stack: ExitStack, tls: bool = False) -> dict[str, Connection]:
    """Start every server and every client; returns how to reach the clients. All end with `stack`.

    `tls`: those with mutual TLS, too.
    """
    if tls:
        os.environ[CERTIFICATES] = stack.enter_context(tempfile.TemporaryDirectory())
        ensure_certs(Path(os.environ[CERTIFICATES]), [("localhost", HOST)])
    spawn = multiprocessing.get_context("spawn")

    def start(target: Callable[..., None], *args: str) -> Connection:
        here, there = spawn.Pipe()
        process = spawn.Process(target=target, args=(there, *args), daemon=True)
        process.start()
        stack.callback(process.join, 5)
        stack.callback(_dismiss, here)
        return here

    clients = {}
    for name in (name for name in CLIENTS if tls or name not in (OURS_TLS, BARE_TLS)):
        address = answer(start(SERVERS[name])) if name in SERVERS else ""
        clients[name] = start(_take_turns, name, address)
    for client in clients.values():
        answer(client)
    return clients
