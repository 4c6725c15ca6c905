"""How a service ends: what is under way when it is told to stop, and what comes afterwards."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest

from odmoe.api.model import OpenedModel
from odmoe.serve import under_way
from odmoe.serve.connection import ClientLimits
from support.machines.gated_answers import begun, gated
from support.machines.http_service import WAIT_S, Served, is_idle, request_bytes, serving, until

if TYPE_CHECKING:
    from odmoe.api.model import Model

ASK: dict[str, Any] = {"model": "demo-moe", "prompt": "Natalia", "max_tokens": 3}


def stopped(served: Served, times: int = 1) -> None:
    for _ in range(times):
        served.server.stop()
    until(lambda: served.service.stopping)


def ended(served: Served) -> list[int]:
    until(lambda: bool(served.code))
    return served.code


def read_all(client: socket.socket) -> bytes:
    client.settimeout(WAIT_S)
    found = b""
    while part := client.recv(1 << 16):
        found += part
    return found


@pytest.fixture
def half_sent(model: Model) -> Iterator[tuple[Served, socket.socket, bytes]]:
    """A client that has sent the first half of its body, and the second half."""
    with serving(model) as served, socket.create_connection(served.address) as client:
        data = request_bytes(served, ASK)
        client.sendall(data[:-20])
        until(lambda: len(served.service.under_way) == 1)
        yield served, client, data[-20:]


def test_what_is_under_way_ends_and_what_comes_is_refused(model: Model) -> None:
    with serving(model) as served, gated() as gate:
        stream = begun(served, gate)
        stopped(served)
        with pytest.raises(openai.InternalServerError, match="stopping") as found:
            served.client().completions.create(**ASK)
        assert (found.value.status_code, found.value.code) == (503, "stopping")
        assert httpx2.get(f"{served.url}/ready").json() == {"status": "not ready", "why": "the server is stopping"}
        assert httpx2.get(f"{served.url}/health").status_code == 200
        assert not served.code
        gate.open()
        assert list(stream)[-1].choices[0].finish_reason == "length"
        assert ended(served) == [0]
        assert served.counted("odmoe_refused_requests_total", reason="stopping") == 1


def test_a_body_that_is_being_sent_is_under_way(half_sent: tuple[Served, socket.socket, bytes]) -> None:
    served, client, rest = half_sent
    stopped(served)
    client.sendall(rest)
    head, _, body = read_all(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert json.loads(body)["usage"]["completion_tokens"] == 3
    assert ended(served) == [0]


def test_a_body_that_is_being_sent_at_the_end_of_a_drain(half_sent: tuple[Served, socket.socket, bytes]) -> None:
    served, client, _ = half_sent
    stopped(served, 2)
    head, _, body = read_all(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert json.loads(body)["error"]["code"] == "stopped"
    assert ended(served) == [0]


@pytest.mark.parametrize("stops", [1, 2])
def test_a_prompt_that_is_being_encoded_is_under_way(model: Model, monkeypatch: pytest.MonkeyPatch, stops: int) -> None:
    begins, goes_on, encode = threading.Event(), threading.Event(), OpenedModel.encode

    def slow(self: OpenedModel, *given: Any, **more: Any) -> list[int]:
        begins.set()
        assert goes_on.wait(WAIT_S)
        return encode(self, *given, **more)

    monkeypatch.setattr(OpenedModel, "encode", slow)
    with serving(model) as served, socket.create_connection(served.address) as client:
        try:
            client.sendall(request_bytes(served, ASK))
            assert begins.wait(WAIT_S)
            stopped(served, stops)
            if stops == 1:
                goes_on.set()
            head = read_all(client)
        finally:
            goes_on.set()
        assert head.startswith(b"HTTP/1.1 200 " if stops == 1 else b"HTTP/1.1 503 ")
        assert ended(served) == [0]


@pytest.mark.parametrize(("drain", "stops"), [(0.2, 1), (600.0, 2)])
def test_a_drain_that_ends_answers(model: Model, drain: float, stops: int) -> None:
    """After its time, or at once the second time: the stream ends with an error, not with a cut."""
    with serving(model, drain_timeout=drain) as served, gated() as gate:
        stream = begun(served, gate)
        stopped(served, stops)
        with pytest.raises(openai.APIError, match="was stopped before the answer was complete") as found:
            list(stream)
        assert found.value.code == "stopped"
        assert ended(served) == [0]
        assert served.counted("odmoe_answers_total", finish="stopped") == 1
        assert served.lines[-1].endswith("finish=stopped")


@pytest.mark.parametrize(("read_s", "stops"), [(0.2, 1), (600.0, 2)])
def test_a_client_that_does_not_read_holds_no_drain_up(
    model: Model, endless: None, monkeypatch: pytest.MonkeyPatch, read_s: float, stops: int
) -> None:
    monkeypatch.setattr(under_way, "GIVEN_UP_S", 0.1)
    with (
        serving(model, client_limits=ClientLimits(read_s=read_s)) as served,
        socket.create_connection(served.address) as client,
    ):
        client.sendall(request_bytes(served, ASK | {"stream": True}))
        until(lambda: served.service.answer_pool.busy_threads == 1)
        stopped(served, stops)
        assert ended(served) == [0]
        until(lambda: is_idle(served))


def test_a_main_node_that_is_gone_for_good_ends_the_service(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that may come back does not."""
    from odmoe.serve import start
    from scheduler.errors import ClusterError, LinkError

    monkeypatch.setattr(start, "GONE_S", 0.05)
    lasting, own = start._LostMainNode(True), start._LostMainNode(False)
    with serving(model) as served:
        lasting.server = own.server = served.server
        gone = LinkError("the main node died")
        for _ in range(3):
            lasting.on_poll(gone)
            time.sleep(0.06)
        for error in (gone, None, gone, ClusterError("slow"), gone):
            own.on_poll(error)
            time.sleep(0.06)
        assert httpx2.get(f"{served.url}/health").status_code == 200
        raised: list[BaseException | None] = []
        monkeypatch.setattr(threading, "excepthook", lambda found: raised.append(found.exc_value))
        own.on_poll(gone)
        until(lambda: bool(raised))
    assert isinstance(raised[0], ClusterError)
    assert "the main node died" in str(raised[0])
