"""Passes connections on to a service on another machine, which may be lost and come back.

What is passed on is the same, byte for byte. When the service is lost, open streams of events get an error event as
their last, requests without an answer get an error of the API, and so do requests until the service is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import socket
import threading
from pathlib import Path
from typing import Any

from odmoe.serve.api_error import SERVER, ApiError
from odmoe.serve.sse import encode, event

LOST = ApiError(
    503,
    "the connection to the cluster's main host was lost before the answer was complete; send the request again",
    SERVER,
    code="main_host_lost",
)
AWAY = ApiError(503, "the cluster's main host is not connected at the moment; try again", SERVER, code="main_host_lost")
READ = 1 << 16
HELD = 1 << 20
"""The largest head of an answer, or event of a stream, that is kept until it is whole."""
REQUEST_S = 10.0
"""Longest wait for a request while there is no service."""
END_S = 10.0
HEADERS = b"\r\n\r\n"
CONNECTIONS = 1500
"""Open at most; the service has a limit of its own below this one."""
FILES = 4096
"""Open files for these, if the system allows as many."""


class Relay:
    """Listens from `lead_to` on, in a thread of its own, until `close`."""

    def __init__(self, listening: socket.socket) -> None:
        """`listening`: bound, not listening yet."""
        self._listening = listening
        self.address: tuple[str, int] = listening.getsockname()[:2]
        self._service: Path | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[Any]] = set()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        allowed = max(soft, FILES if hard == resource.RLIM_INFINITY else min(hard, FILES))
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        self._most = min(CONNECTIONS, (allowed - 64) // 2)

    def lead_to(self, service: Path) -> None:
        """Connections that come are passed on to this socket."""
        self._service = service
        if self._server is None:
            self._thread.start()
            asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(END_S)

    def on_lost(self) -> None:
        """There is no service, until `lead_to` is called again."""
        self._service = None

    def close(self) -> None:
        """End all connections."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(END_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(END_S)
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._on_connection, sock=self._listening, limit=READ)

    async def _end(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await asyncio.sleep(0)  # for the sockets to be closed

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= self._most:
            writer.close()
            return
        task = asyncio.current_task()
        if task is not None:
            self._connections.add(task)
        try:
            with contextlib.suppress(OSError):
                await self._pass_on(reader, writer)
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            if task is not None:
                self._connections.discard(task)
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._service is None:
                raise ConnectionError
            from_service, to_service = await asyncio.open_unix_connection(self._service)
        except OSError:
            await _refuse(reader, writer)
            return
        answer = CutAnswer()
        asking = asyncio.create_task(_ask(reader, to_service, answer))
        try:
            with contextlib.suppress(OSError):
                while data := await from_service.read(READ):
                    writer.write(answer.whole(data))
                    await writer.drain()
            writer.write(answer.end())
            await writer.drain()
        finally:
            asking.cancel()
            to_service.transport.abort()


async def _ask(reader: asyncio.StreamReader, to_service: asyncio.StreamWriter, answer: CutAnswer) -> None:
    """Pass a client's bytes on. A client that is gone ends the connection to the service."""
    try:
        while data := await reader.read(READ):
            answer.on_request(data)
            to_service.write(data)
            await to_service.drain()
        to_service.write_eof()
    except OSError:
        to_service.transport.abort()


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
        async with asyncio.timeout(REQUEST_S):
            await reader.readuntil(HEADERS)
            writer.write(response_of(AWAY))
            writer.write_eof()
            while await reader.read(READ):  # else what comes of its body would reset the connection
                pass


def response_of(error: ApiError) -> bytes:
    """A whole response of HTTP/1.1, after which the connection ends."""
    body = encode(error.as_object())
    fields = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **error.headers,
    }
    lines = [f"HTTP/1.1 {error.status} Service Unavailable", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode() + HEADERS + body


class CutAnswer:
    """The answers of one connection as far as they may be passed on: events of a stream only when they are whole, so
    that an error event can be the last at any moment."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._state = "idle"
        """`idle`, `asked`, then `chunks` or `body` after the headers; `over`: whatever comes is passed on as it is."""
        self._left = 0
        """Bytes of the body that have yet to come."""
        self._method_is_head = False
        self._events = False

    def on_request(self, data: bytes) -> None:
        """A client has sent this."""
        if self._state == "idle":
            self._state, self._method_is_head = "asked", data.startswith(b"HEAD ")

    def whole(self, data: bytes) -> bytes:
        """What may be passed on of `data` and of what was held before."""
        self._held += data
        passed = bytearray()
        while part := self._next():
            passed += part
        if len(self._held) > HELD:
            self._state = "over"
            passed += self._take(len(self._held))
        return bytes(passed)

    def end(self) -> bytes:
        """What a client has yet to get if the service ends the connection now."""
        if self._state == "asked":
            return response_of(LOST)
        if self._state == "chunks" and self._events:
            data = event(LOST.as_object())
            return b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
        return b""

    def _next(self) -> bytes:
        """The next whole part of what is held; empty if none is whole."""
        if self._state == "over":
            return self._take(len(self._held))
        if self._state == "body":
            taken = self._take(min(self._left, len(self._held)))
            self._left -= len(taken)
            self._state = "body" if self._left else "idle"
            return taken
        if self._state == "chunks":
            return self._chunk()
        end = self._held.find(HEADERS)
        if end < 0:
            return b""
        head = self._take(end + len(HEADERS))
        self._state = self._state_after(head.lower())
        return head

    def _chunk(self) -> bytes:
        line, newline, _ = self._held.partition(b"\r\n")
        if not newline:
            return b""
        try:
            size = int(line.partition(b";")[0], 16)
        except ValueError:
            self._state = "over"
            return self._take(len(self._held))
        length = len(line) + 2 + size + 2
        if len(self._held) < length:
            return b""
        if size == 0:
            self._state = "idle"
        return self._take(length)

    def _state_after(self, head: bytes) -> str:
        """After the headers of a response, in lower case."""
        status = head[9:12]
        if status.startswith(b"1"):
            return "asked"
        self._events = b"\r\ncontent-type: text/event-stream" in head
        length = re.search(rb"\r\ncontent-length: *(\d+)", head)
        self._left = int(length[1]) if length else 0
        empty = self._method_is_head or status in (b"204", b"304") or (length is not None and not self._left)
        if b"\r\nconnection: close" in head and not self._events:
            return "over"
        if empty:
            return "idle"
        if b"\r\ntransfer-encoding: chunked" in head:
            return "chunks"
        return "body" if length else "over"

    def _take(self, count: int) -> bytes:
        taken = bytes(self._held[:count])
        del self._held[:count]
        return taken
