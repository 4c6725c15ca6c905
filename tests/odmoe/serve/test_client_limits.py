"""Clients that send or read slowly. Too many of them: bounds/test_strangers.py."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from main_node.answer import Step
from odmoe.api.text_answer import Piece, TextAnswer
from odmoe.serve import under_way
from odmoe.serve.connection import ClientLimits
from support.machines.http_service import WAIT_S, Served, is_idle, request_bytes, serving, until

if TYPE_CHECKING:
    from odmoe.api.model import Model

ASK: dict[str, Any] = {"model": "demo-moe", "prompt": "Natalia", "max_tokens": 3}


@contextmanager
def connected(served: Served, sent: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(served.address) as client:
        client.settimeout(WAIT_S)
        client.sendall(sent)
        yield client


def read_all(client: socket.socket) -> bytes:
    found = b""
    while part := client.recv(1 << 16):
        found += part
    return found


def connections(served: Served) -> int:
    return len(served.server._uvicorn.server_state.connections)


@pytest.fixture(scope="module")
def hasty(model: Model) -> Iterator[Served]:
    """Has little patience with what is sent."""
    with serving(model, client_limits=ClientLimits(headers_s=0.2)) as made:
        yield made


@pytest.mark.parametrize("sent", [b"", b"GET", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"])
def test_headers_that_do_not_come(hasty: Served, sent: bytes) -> None:
    before = hasty.counted("odmoe_refused_requests_total", reason="slow_request")
    with connected(hasty, sent) as client:
        head, _, body = read_all(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"]["code"] == "slow_request"
    until(lambda: connections(hasty) == 0)
    assert hasty.counted("odmoe_refused_requests_total", reason="slow_request") == before + 1


def test_headers_of_a_second_request_that_do_not_come(hasty: Served) -> None:
    whole = f"GET /health HTTP/1.1\r\nHost: {hasty.host}\r\n\r\n".encode()
    with connected(hasty, whole) as client:
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        client.sendall(whole[:-5])
        assert b"HTTP/1.1 408 " in read_all(client)


def test_a_body_that_nobody_needs_and_does_not_come(hasty: Served) -> None:
    head = f"POST /v1/nothing HTTP/1.1\r\nHost: {hasty.host}\r\nContent-Length: 100\r\n\r\nx"
    with connected(hasty, head.encode()) as client:
        assert read_all(client).startswith(b"HTTP/1.1 404 ")
    until(lambda: connections(hasty) == 0)


@pytest.mark.slow
def test_a_body_that_does_not_come(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.service, "limits", replace(served.service.limits, body_s=0.2))
    with connected(served, request_bytes(served, ASK)[:-10]) as client:
        found = read_all(client)
    assert found.startswith(b"HTTP/1.1 408 ")
    assert b'"slow_request"' in found
    until(lambda: is_idle(served))


def test_whoever_is_turned_away_and_stays_is_cut_off(model: Model) -> None:
    with (
        serving(model, client_limits=ClientLimits(headers_s=0.1, farewell_s=0.1)) as served,
        connected(served) as client,
    ):
        assert read_all(client).startswith(b"HTTP/1.1 408 ")
        until(lambda: connections(served) == 0)  # though the client has not closed its end


def test_a_stream_that_nobody_reads(model: Model, endless: None) -> None:
    with serving(model, client_limits=ClientLimits(read_s=0.2)) as served:
        with connected(served, request_bytes(served, ASK | {"stream": True})):
            until(lambda: bool(served.lines))
            until(lambda: is_idle(served) and connections(served) == 0)
        assert served.lines[0].endswith("finish=cancelled")


@pytest.mark.slow
def test_a_response_that_nobody_reads(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is whole: it is the connection that is given up."""

    def long(self: Any, *given: Any) -> Iterator[Piece]:
        yield Piece("x" * (32 << 20), Step(5, finish="length"))

    monkeypatch.setattr(TextAnswer, "_read", long)
    with serving(model, client_limits=ClientLimits(read_s=0.2)) as served:
        with connected(served, request_bytes(served, ASK)):
            until(lambda: bool(served.lines))
            until(lambda: is_idle(served) and connections(served) == 0)
        assert served.lines[0].endswith("finish=length")


def test_a_client_that_reads_slowly_gets_everything(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the time without any progress that counts: here it never reads nothing for so long."""
    text = "x" * (8 << 20)

    def long(self: Any, *given: Any) -> Iterator[Piece]:
        yield Piece(text, Step(5, finish="length"))

    monkeypatch.setattr(TextAnswer, "_read", long)
    with serving(model) as served, connected(served, request_bytes(served, ASK)) as client:
        found = b""
        while len(found) < len(text):
            found += client.recv(4096)
        assert found.startswith(b"HTTP/1.1 200 ")
        until(lambda: is_idle(served))


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_the_deadline_of_an_answer_that_nobody_reads(
    model: Model, endless: None, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(under_way, "GIVEN_UP_S", 0.1)
    with serving(model, request_timeout=0.3) as served:
        with connected(served, request_bytes(served, ASK | {"stream": stream})):
            until(lambda: bool(served.lines))
            until(lambda: is_idle(served))
        assert served.lines[0].endswith("finish=deadline")
