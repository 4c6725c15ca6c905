"""Server-sent events, and JSON as it goes over the wire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

EVENT_STREAM = "text/event-stream"
DONE = b"data: [DONE]\n\n"
"""The last event of a stream that has its whole answer."""
PING = b": ping\n\n"
"""A comment, which clients skip."""
MANY = 256
"""Items of a list that are encoded together."""
SLICE_BYTES = 256 << 10
"""Of a response that are given to the connection at a time."""
PING_S = 15.0
"""Longest silence: proxies cut a connection on which nothing comes, many after 60 s."""


def encode(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def encoded_parts(value: Any) -> Iterator[bytes]:
    """What `encode` gives, in parts. Encoding lets no other thread run; between two parts others have their turn."""
    if isinstance(value, dict):
        yield b"{"
        for number, (name, inner) in enumerate(value.items()):
            yield (b"," if number else b"") + encode(name) + b":"
            yield from encoded_parts(inner)
        yield b"}"
    elif isinstance(value, list) and len(value) > MANY:
        for at in range(0, len(value), MANY):
            yield (b"," if at else b"[") + encode(value[at : at + MANY])[1:-1]
        yield b"]"
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield b"," if number else b"["
            yield from encoded_parts(inner)
        yield b"]" if value else b"[]"
    else:
        yield encode(value)


def event(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """An event that has its `type` as its name too."""
    return b"event: " + str(value["type"]).encode() + b"\n" + event(value)


class WholeResponse(Response):
    """JSON that may be long. The connection gets a part when the client has read those before."""

    media_type = "application/json"

    def __init__(self, content: bytes) -> None:
        super().__init__(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = memoryview(self.body)
        for at in range(0, len(body), SLICE_BYTES):
            part = bytes(body[at : at + SLICE_BYTES])
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(Response):
    """Sends events as they come, and comments while none comes. The headers go out with the first of either: what fails
    before is raised; afterwards `failed` makes the last event of it, or none."""

    media_type = EVENT_STREAM

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        failed: Callable[[Exception], bytes],
        ping_s: float | None = None,
        media_type: str = EVENT_STREAM,
        ping: bytes = PING,
    ) -> None:
        """`ping_s`: None is `PING_S`. `ping`: what is sent if nothing else is; empty: nothing."""
        self.status_code, self.background, self.media_type = 200, None, media_type
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events, self._failed = events, failed
        self._ping_s = PING_S if ping_s is None else ping_s
        self._ping_bytes = ping
        self._lock = asyncio.Lock()
        self._started = False
        self._sent_at: float | None = None
        """None: nothing was sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pinging = asyncio.create_task(self._ping(send))
        try:
            async with aclosing(self._events) as events:
                async for data in events:
                    await self._send(send, data)
        except Exception as error:
            await _end(pinging)
            if not self._started:
                raise
            await self._send(send, self._failed(error))
        finally:
            await _end(pinging)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        async with self._lock:
            if not self._started:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                self._started = True
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._sent_at = asyncio.get_running_loop().time()

    async def _ping(self, send: Send) -> None:
        if not self._ping_bytes:
            return
        last = asyncio.get_running_loop().time()
        while True:
            left = last + self._ping_s - asyncio.get_running_loop().time()
            if left > 0:
                await asyncio.sleep(left)
            elif self._sent_at is not None and self._sent_at > last:
                last = self._sent_at
            else:
                await self._send(send, self._ping_bytes)
                last = asyncio.get_running_loop().time()


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))
