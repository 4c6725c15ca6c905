"""Connections that are passed on to a service which ends in the middle."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h11
import pytest

from odmoe.commands.over_ssh.relay import HELD, CutAnswer, Relay

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
FIRST = b'data: {"n": 1}\n\n'
CHUNK = b"%x\r\n%s\r\n" % (len(FIRST), FIRST)
LAST = b"0\r\n\r\n"
LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
ASKED = b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-length: 2\r\n\r\n{}"


def events(data: bytes, method: bytes = b"POST") -> list[Any]:
    """What h11, a client of HTTP/1.1, makes of a whole answer: its status, and its body."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method=method, target="/", headers=[("host", "here")]))
    client.send(h11.EndOfMessage())
    client.receive_data(data)
    found: list[Any] = []
    body = b""
    while not isinstance(event := client.next_event(), h11.EndOfMessage):
        assert event is not h11.NEED_DATA, "it is not whole"
        if isinstance(event, h11.Response):
            found.append(event.status_code)
        elif isinstance(event, h11.Data):
            body += event.data
    return [*found, body]


def test_a_stream_that_ends_anywhere_has_an_error_as_its_last_event() -> None:
    for cut in range(len(HEAD + CHUNK + CHUNK) + 1):
        answer = CutAnswer()
        answer.on_request(ASKED)
        passed = b"".join(answer.whole(bytes([byte])) for byte in (HEAD + CHUNK + CHUNK)[:cut])
        status, body = events(passed + answer.end())
        if cut < len(HEAD):
            assert status == 503, cut
            error = json.loads(body)
        else:
            assert status == 200, cut
            whole = (cut - len(HEAD)) // len(CHUNK)
            assert body.startswith(FIRST * whole), cut
            error = json.loads(body.removeprefix(FIRST * whole).removeprefix(b"data: "))
        assert error["error"]["code"] == "main_host_lost", cut


@pytest.mark.parametrize(
    ("asked", "came"),
    [
        (b"", b""),
        (ASKED, HEAD + CHUNK + LAST),
        (ASKED, LENGTH + b"12345"),
        (ASKED, LENGTH + b"123"),
        (b"HEAD /health HTTP/1.1\r\n\r\n", LENGTH),
        (ASKED, b"HTTP/1.1 204 No Content\r\n\r\n"),
        (ASKED, b"HTTP/1.1 413 Too Large\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}"),
        (ASKED, b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata"),
        (ASKED, b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabcde\r\n"),
    ],
)
def test_what_has_ended_or_cannot_be_ended_gets_nothing_more(asked: bytes, came: bytes) -> None:
    answer = CutAnswer()
    answer.on_request(asked) if asked else None
    assert answer.whole(came) == came
    assert answer.end() == b""


def test_the_next_answer_of_a_connection() -> None:
    answer = CutAnswer()
    for came in (LENGTH + b"12345", HEAD + CHUNK + LAST, b"HTTP/1.1 100 Continue\r\n\r\n" + LENGTH + b"54321"):
        answer.on_request(ASKED)
        assert answer.whole(came) == came
    answer.on_request(ASKED)
    assert events(answer.end())[0] == 503


def test_what_is_held_is_bounded() -> None:
    answer = CutAnswer()
    answer.on_request(ASKED)
    large = HEAD + b"%x\r\n" % (8 * HELD) + bytes(2 * HELD)
    assert answer.whole(large) == large
    assert answer.whole(b"more") == b"more"
    assert answer.end() == b""


# --- connections ------------------------------------------------------------------------------------------------------


@pytest.fixture
def relay() -> Iterator[Relay]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        with contextlib.closing(Relay(listening)) as made:
            yield made


@contextlib.contextmanager
def service(path: Path, serve: Callable[[socket.socket], object]) -> Iterator[Path]:
    """`serve` gets the first connection; then the service is gone."""

    def run() -> None:
        with listening.accept()[0] as connection:
            serve(connection)

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        thread = threading.Thread(target=run)
        thread.start()
        yield path
        thread.join(20)


def ask(relay: Relay) -> bytes:
    """All that comes of one request."""
    with socket.create_connection(relay.address, 20) as client:
        client.sendall(ASKED)
        found = b""
        while data := client.recv(1 << 16):
            found += data
        return found


def test_bytes_go_both_ways_and_a_cut_stream_ends_with_an_error(relay: Relay, tmp_path: Path) -> None:
    got: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        got.append(connection.recv(1 << 16))
        connection.sendall(HEAD + CHUNK + CHUNK[:5])

    with service(tmp_path / "s", serve) as path:
        relay.lead_to(path)
        status, body = events(ask(relay))
    assert got == [ASKED]
    assert (status, body.count(b"data: "), b"main_host_lost" in body) == (200, 2, True)


def test_requests_while_there_is_no_service_and_when_it_is_back(relay: Relay, tmp_path: Path) -> None:
    with service(tmp_path / "s", lambda connection: connection.recv(1 << 16)) as path:
        relay.lead_to(path)
        status, body = events(ask(relay))
    assert (status, json.loads(body)["error"]["code"]) == (503, "main_host_lost")
    answer = ask(relay)  # nothing listens at the socket any more
    assert b"\r\nRetry-After: 1\r\n" in answer
    relay.on_lost()
    assert events(ask(relay))[0] == 503
    with service(tmp_path / "t", lambda connection: connection.sendall(LENGTH + b"12345")) as path:
        relay.lead_to(path)
        assert events(ask(relay)) == [200, b"12345"]


def test_a_client_that_goes_ends_its_connection_to_the_service(relay: Relay, tmp_path: Path) -> None:
    gone = threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(HEAD)
        if connection.recv(1 << 16) == b"":
            gone.set()

    with service(tmp_path / "s", serve) as path:
        relay.lead_to(path)
        with socket.create_connection(relay.address, 20) as client:
            client.sendall(ASKED)
            assert client.recv(len(HEAD)) == HEAD
        assert gone.wait(20)


def test_an_open_connection_does_not_hold_up_the_end(relay: Relay, tmp_path: Path) -> None:
    begun, over = threading.Event(), threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        begun.set()
        over.wait(20)

    with service(tmp_path / "s", serve) as path:
        relay.lead_to(path)
        with socket.create_connection(relay.address, 20) as client:
            client.sendall(ASKED)
            assert begun.wait(20)
            relay.close()
            assert client.recv(10) == b""
        over.set()
