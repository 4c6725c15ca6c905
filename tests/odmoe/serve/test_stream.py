"""Streams of events: when their headers go out, what is sent while nothing comes, and how they fail."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import pytest

from odmoe.serve import sse
from odmoe.serve.sse import PING, EventStream
from support.machines.gated_answers import gated
from support.machines.http_service import WAIT_S, request_bytes

if TYPE_CHECKING:
    from support.machines.http_service import Served

HOUR_S = 3600.0


class Client:
    """What a stream has sent."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.pinged = asyncio.Event()

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        if message.get("body") == PING:
            self.pinged.set()

    async def gets(self, stream: EventStream) -> list[bytes]:
        """The bodies, after the headers."""
        await asyncio.wait_for(stream({}, None, self.send), WAIT_S)  # type: ignore[arg-type]
        start, *rest = self.messages
        assert (start["type"], start["status"]) == ("http.response.start", 200)
        assert [one["more_body"] for one in rest] == [True] * (len(rest) - 1) + [False]
        return [one["body"] for one in rest]


def as_event(error: Exception) -> bytes:
    return f"data: {error}\n\n".encode()


def test_headers_go_out_with_a_ping_where_nothing_else_comes() -> None:
    async def run() -> None:
        client = Client()

        async def events() -> AsyncGenerator[bytes, None]:
            await client.pinged.wait()
            client.pinged.clear()
            yield b"data: 1\n\n"
            await client.pinged.wait()
            yield b"data: 2\n\n"

        found = await client.gets(EventStream(events(), as_event, 0.01))
        assert found[0] == PING
        assert [one for one in found if one != PING] == [b"data: 1\n\n", b"data: 2\n\n", b""]
        assert found.index(b"data: 2\n\n") > found.index(b"data: 1\n\n") + 1

    asyncio.run(run())


def test_no_ping_while_events_come() -> None:
    async def run() -> None:
        async def events() -> AsyncGenerator[bytes, None]:
            for number in range(100):
                await asyncio.sleep(0)
                yield b"data: %d\n\n" % number

        assert PING not in await Client().gets(EventStream(events(), as_event, HOUR_S))

    asyncio.run(run())


def test_what_fails_before_anything_was_sent_is_raised() -> None:
    async def run() -> None:
        async def events() -> AsyncGenerator[bytes, None]:
            raise ValueError("full")
            yield b""

        client = Client()
        with pytest.raises(ValueError, match="full"):
            await client.gets(EventStream(events(), as_event, HOUR_S))
        assert not client.messages

    asyncio.run(run())


def test_what_fails_after_a_ping_is_an_event() -> None:
    async def run() -> None:
        client = Client()

        async def events() -> AsyncGenerator[bytes, None]:
            await client.pinged.wait()
            raise ValueError("lost")
            yield b""

        assert (await client.gets(EventStream(events(), as_event, 0.01)))[-2:] == [b"data: lost\n\n", b""]

    asyncio.run(run())


def test_events_are_closed_with_the_stream() -> None:
    async def run() -> None:
        begun, closed = asyncio.Event(), asyncio.Event()

        async def events() -> AsyncGenerator[bytes, None]:
            try:
                begun.set()
                await asyncio.Event().wait()
                yield b""
            finally:
                closed.set()

        stream = asyncio.create_task(EventStream(events(), as_event, HOUR_S)({}, None, Client().send))  # type: ignore[arg-type]
        await begun.wait()
        stream.cancel()
        await asyncio.wait((stream,))
        assert closed.is_set()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_a_client_that_waits_in_the_queue(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has headers and comments before the first token; the official client skips them."""
    monkeypatch.setattr(sse, "PING_S", 0.01)
    ask: dict[str, Any] = {"model": "demo-moe", "prompt": "Natalia", "max_tokens": 2, "stream": True}
    with gated() as gate, socket.create_connection(served.address) as client:
        client.settimeout(WAIT_S)
        client.sendall(request_bytes(served, ask))
        found = b""
        while PING not in found:
            found += client.recv(1 << 16)
        assert found.startswith(b"HTTP/1.1 200 ")
        assert b"data:" not in found
        gate.open()
        while b"[DONE]" not in found:
            found += client.recv(1 << 16)
        events = [json.loads(line[6:]) for line in found.splitlines() if line.startswith(b"data: {")]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert [one for one in served.client().completions.create(**ask) if one.choices]


def test_an_error_after_a_ping(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    import openai

    from odmoe.api.text_answer import TextAnswer
    from scheduler.errors import MainNodeLostError

    pinged = threading.Event()

    def lost(self: Any, *given: Any) -> Any:
        assert pinged.wait(WAIT_S)
        raise MainNodeLostError("the main node is gone")
        yield

    monkeypatch.setattr(sse, "PING_S", 0.01)
    monkeypatch.setattr(TextAnswer, "_read", lost)
    stream = served.client().completions.create(model="demo-moe", prompt="a", stream=True)  # its headers have come
    pinged.set()
    with pytest.raises(openai.APIError, match="the main node is gone") as found:
        list(stream)
    assert found.value.code == "main_node_lost"
