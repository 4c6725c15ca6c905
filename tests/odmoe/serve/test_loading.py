"""What clients are told while the model loads, and what they are told next on the same socket."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import TYPE_CHECKING

import httpx2
import openai
import pytest

from odmoe.serve.access_log import FORMATS
from odmoe.serve.app import Access, make_app
from odmoe.serve.lifetime import HttpServer
from odmoe.serve.loading import LoadingServer, LoadProgress, StartTerminal
from odmoe.serve.start import make_service
from odmoe.serve.warm_up import warm_up
from odmoe.settings.serve_settings import ServeSettings
from odmoe.terminal import Output
from scheduler.errors import RequestError
from support.machines.http_service import WAIT_S, Served, until

if TYPE_CHECKING:
    from odmoe.api.model import Model


def test_it_listens_and_says_how_far_it_is() -> None:
    progress, lines = LoadProgress(), list[str]()
    with socket.create_server(("127.0.0.1", 0)) as bound:
        url = "http://{}:{}".format(*bound.getsockname())
        with LoadingServer(bound, progress, lines.append, FORMATS["json"]), httpx2.Client(base_url=url) as client:
            assert client.get("/health").json() == {"status": "ok"}
            with StartTerminal(Output(quiet=True), progress).progress("opening the model") as move:
                move("experts", 45, 100)
            found = client.get("/ready")
            assert (found.status_code, found.headers["retry-after"]) == (503, "5")
            assert found.json()["progress"] | {"elapsed_s": 0} == {
                "phase": "writing experts",
                "share": 0.45,
                "elapsed_s": 0,
            }
            official = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            with official, pytest.raises(openai.InternalServerError, match="writing experts, 45%") as told:
                official.completions.create(model="demo-moe", prompt="a")
            assert (told.value.status_code, told.value.code) == (503, "loading")
            assert told.value.response.headers["retry-after"] == "5"
            message = client.post("/v1/messages").json()
            assert (message["type"], message["error"]["type"]) == ("error", "overloaded_error")
            assert isinstance(client.get("/api/tags").json()["error"], str)
    line = json.loads(lines[0])
    assert (line["path"], line["status"], line["finish"]) == ("/v1/completions", 503, "loading")


def test_the_service_takes_the_socket_over(model: Model) -> None:
    """Without a moment in which a connection is refused: it waits for the next server."""
    service = make_service(model, ServeSettings())
    statuses: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as bound:
        address = bound.getsockname()
        over = threading.Event()

        def ask() -> None:
            while not over.is_set():
                statuses.append(httpx2.get("http://{}:{}/ready".format(*address), timeout=WAIT_S).status_code)

        asking = threading.Thread(target=ask)
        with LoadingServer(bound, LoadProgress(), lambda line: None, FORMATS["text"]):
            asking.start()
            until(lambda: 503 in statuses)
        server = HttpServer(make_app(service, Access()), service, bound, 1.0)
        serving = threading.Thread(target=server.run)
        serving.start()
        until(lambda: 200 in statuses)
        over.set()
        asking.join(WAIT_S)
        server.stop()
        server.stop()
        serving.join(WAIT_S)
        service.close()
    assert statuses == sorted(statuses, reverse=True)
    assert set(statuses) == {200, 503}


def test_a_request_that_arrives_while_it_ends_is_answered() -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        loading = LoadingServer(bound, LoadProgress(), lambda line: None, FORMATS["text"])
        with loading, socket.create_connection(bound.getsockname(), WAIT_S) as early:
            early.sendall(b"GET /ready HTTP/1.1\r\n")
            httpx2.get("http://{}:{}/health".format(*bound.getsockname()), timeout=WAIT_S)  # accepted after it
            ending = threading.Thread(target=loading.close)
            ending.start()
            time.sleep(0.3)  # uvicorn looks ten times a second whether it shall end
            early.sendall(b"Host: here\r\n\r\n")
            assert early.makefile("rb").readline().startswith(b"HTTP/1.1 503")
            ending.join(WAIT_S)


def test_a_first_answer_that_fails_is_told(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    causes: list[str] = []
    monkeypatch.setattr(served.service, "log_cause", causes.append)
    warm_up(served.service)
    assert not served.service.failed.is_set()

    def fail(*_: object) -> None:
        raise RequestError("the disk is gone")

    monkeypatch.setattr(served.service.model, "answer", fail)
    warm_up(served.service)
    assert served.service.failed.is_set()
    assert causes == ["first-answer RequestError: the disk is gone"]
    served.service.failed.clear()
