"""Connections of strangers cost nobody else anything."""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from odmoe.serve.bounds import listening
from odmoe.serve.connection import ClientLimits
from support.machines.gated_answers import begun, gated
from support.machines.http_service import WAIT_S, Served, is_idle, request_bytes, serving, until

if TYPE_CHECKING:
    from odmoe.api.model import Model

KEY = "a-key-that-is-long-enough"
ASK: dict[str, Any] = {"model": "demo-moe", "prompt": "Natalia", "max_tokens": 2}
FEW = ClientLimits(connections=20, address_connections=12)


def held(served: Served) -> int:
    return len(served.server._uvicorn.server_state.connections)


@contextmanager
def connected(served: Served, source: str = "127.0.0.1") -> Iterator[socket.socket]:
    with socket.create_connection(served.address, WAIT_S, (source, 0)) as made:
        yield made


def ask(served: Served, path: str = "/health") -> int:
    return httpx2.get(f"{served.url}{path}", timeout=WAIT_S).status_code


def answers(served: Served, key: str = "none") -> bool:
    return bool(served.client(key).completions.create(**ASK).choices)


SILENT = b""
HALF = b"GET /health HTTP/1.1\r\nHost: 127"
BODY = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{"
KEPT = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
TLS = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "addresses"),
    [(SILENT, 1), (HALF, 50), (BODY, 1), (KEPT, 50), (TLS, 1)],
    ids=["silent", "half", "body", "kept", "tls"],
)
def test_many_more_than_there_are_places_for(model: Model, sent: bytes, addresses: int) -> None:
    with serving(model, client_limits=FEW) as served, ExitStack() as stack:
        for number in range(100):
            one = stack.enter_context(connected(served, f"127.0.0.{number % addresses + 1}"))
            with contextlib.suppress(OSError):
                one.sendall(sent)
            if number % 20 == 0:
                assert ask(served) == 200
        assert answers(served)
        assert ask(served) == 200
        assert held(served) <= FEW.connections
    assert not any("Traceback" in line for line in served.lines)


def test_without_the_key(model: Model) -> None:
    with serving(model, (KEY,), FEW) as served, ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(connected(served)).sendall(BODY)
        assert answers(served, KEY)


def test_who_does_not_read_gives_way_too(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has asked so often that the answers fill every buffer."""
    whole = KEPT * 20_000
    four = replace(FEW, connections=4, address_connections=4)
    with serving(model, client_limits=four) as served, ExitStack() as stack:
        for _ in range(4):
            one = stack.enter_context(connected(served))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    one.send(whole)
        assert ask(served) == 200


@pytest.mark.slow
def test_watchers_have_a_place_of_their_own(model: Model) -> None:
    """Where every connection has an answer under way."""
    most = 3
    with gated() as gate, serving(model, client_limits=ClientLimits(connections=most)) as served, ExitStack() as stack:
        streams = [begun(served, gate) for _ in range(most)]
        for stream in streams:
            stack.callback(stream.close)
        assert {path: ask(served, path) for path in ("/health", "/ready", "/metrics")} == {
            "/health": 200,
            "/ready": 200,
            "/metrics": 200,
        }
        for _ in range(50):
            stack.enter_context(connected(served))
        assert ask(served) == 200
        refused = httpx2.get(f"{served.url}/v1/models")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_connections")
        assert refused.headers["connection"] == "close"
        gate.open()
        assert all(list(stream) for stream in streams)
        until(lambda: is_idle(served))
        assert answers(served)


def reset(one: socket.socket) -> None:
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    one.close()


@pytest.mark.slow
def test_resets_at_every_moment(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    """None of them leaves a line of the server itself, or anything under way."""
    client_limits = replace(FEW, headers_s=0.05, farewell_s=0.05)
    with caplog.at_level(logging.WARNING), serving(model, client_limits=client_limits) as served:
        whole = request_bytes(served, ASK | {"stream": True, "max_tokens": 50})
        chunked = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        for number, sent in enumerate(
            [SILENT, HALF, TLS, BODY, KEPT, KEPT * 50, whole, chunked + b"5\r\nabcdezz", chunked + b"zz\r\n"] * 6
        ):
            one = socket.create_connection(served.address)
            one.sendall(sent)
            time.sleep(0.02 * (number % 4))
            if number % 5 == 0 and sent == whole:
                one.recv(1)
            reset(one)
        until(lambda: held(served) == 0)
        until(lambda: is_idle(served))
        assert ask(served) == 200
    assert [record.getMessage() for record in caplog.records] == []


def test_what_is_no_http_is_told_so(served: Served) -> None:
    before = served.counted("odmoe_refused_requests_total", reason="invalid_http")
    with connected(served) as one:
        one.sendall(TLS + b"\r\n\r\n")
        assert one.recv(1 << 16).startswith(b"HTTP/1.1 400 ")
    assert served.counted("odmoe_refused_requests_total", reason="invalid_http") == before + 1


def test_a_request_in_tiny_chunks(model: Model) -> None:
    with serving(model, client_limits=ClientLimits(parsing_s=0.2)) as served, connected(served) as one:
        one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(OSError):  # a reset, or a broken pipe
            for _ in range(400):
                one.sendall(b"1\r\nx\r\n" * 10_000)
        until(lambda: held(served) == 0)
        assert ask(served) == 200


@pytest.mark.slow
def test_no_file_is_left(model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is told once, and serves again when there is one."""
    lines: list[str] = []
    with serving(model) as served:
        served.server._places._notify = lines.append
        with monkeypatch.context() as patch:

            def exhausted(self: Any) -> Any:
                raise OSError(24, "Too many open files")

            patch.setattr(listening.socket.socket, "_accept", exhausted, raising=False)
            with connected(served):
                until(lambda: bool(lines))
                time.sleep(0.3)
        assert ask(served) == 200
    assert len(lines) == 1
    assert "ulimit -n" in lines[0]
    assert caplog.records == []


def test_the_limit_of_open_files_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        room = listening.raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, listening.FILES)
        assert 0 < room < min(hard, listening.FILES)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
