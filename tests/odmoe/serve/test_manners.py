"""What a client meets that leaves, comes at a bad time, or asks too much."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest

from scheduler.errors import MainNodeLostError, NonFiniteError
from support.machines.http_service import WAIT_S, Served, demo_model, serving

if TYPE_CHECKING:
    from odmoe.api.model import Model

NAME = "demo-moe"
ASK: dict[str, Any] = {"model": NAME, "prompt": "Natalia sold clips"}
LONG: dict[str, Any] = ASK | {"max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(demo_store: Callable[[str], Any]) -> Iterator[Model]:
    """Two at once, and two that wait."""
    with demo_model(demo_store("float32"), parallel=2, queue=2) as made:
        yield made


class Panic(BaseException):
    """As a library in Rust raises it."""


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def is_idle(served: Served) -> bool:
    """Nothing is left of any request, here or in the engine."""
    figures = served.service.model.cluster.figures()
    main: Any = served.service.model.cluster.main  # type: ignore[attr-defined]
    return (figures.answered, figures.waiting, served.service.desk.taken, len(served.service.under_way)) == (
        0,
        0,
        0,
        0,
    ) and main.engine.idle()


def request_bytes(served: Served, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def pool_threads() -> int:
    """Of every service in this process: those of ended ones may be about to end."""
    return sum(one.name.startswith("odmoe-request") for one in threading.enumerate())


def strangers(known: set[threading.Thread]) -> list[str]:
    """Threads that have begun since, but those of pools."""
    pools = ("odmoe-request", "asyncio_")
    return [one.name for one in threading.enumerate() if one not in known and not one.name.startswith(pools)]


def begun(served: Served) -> Any:
    """A long answer that has given its first token; iterate over it for the rest."""
    extra = {"ignore_eos": True}
    stream = served.client().completions.create(**ASK, max_tokens=900, stream=True, extra_body=extra)
    assert next(iter(stream)).choices
    return stream


def test_clients_that_vanish(served: Served) -> None:
    """Twenty, in every state: not answered yet, within a stream, with half of a request sent."""
    assert served.client().completions.create(**ASK, max_tokens=2).choices  # starts what the engine keeps
    threads, lines = set(threading.enumerate()), len(served.lines)
    pools = pool_threads()
    for number in range(20):
        with socket.create_connection(served.address) as client:
            data = request_bytes(served, LONG | {"stream": number % 2 == 0})
            client.sendall(data if number % 5 else data[:-10])
            client.settimeout(WAIT_S)
            if number % 4 == 0 and number % 5:
                assert client.recv(64)
    until(lambda: len(served.lines) >= lines + 20)
    until(lambda: is_idle(served))
    until(lambda: not strangers(threads))
    assert pool_threads() - pools <= served.service.desk.places
    assert served.client().completions.create(**ASK, max_tokens=2).choices[0].text


def test_the_answer_of_a_client_that_does_not_read_ends_with_the_deadline(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.service, "limits", replace(served.service.limits, request_timeout_s=0.5))
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(served.address)
        client.sendall(request_bytes(served, LONG | {"stream": True, "logprobs": 20, "n": 2}))
        until(lambda: served.service.desk.taken > 0)
        until(lambda: served.service.desk.taken == 0)
        main: Any = served.service.model.cluster.main  # type: ignore[attr-defined]
        until(main.engine.idle)
    until(lambda: is_idle(served))


def test_a_client_that_has_gone_is_noted(served: Served) -> None:
    before = len(served.lines)
    begun(served).close()
    until(lambda: len(served.lines) > before)
    assert "finish=cancelled" in served.lines[-1]
    until(lambda: is_idle(served))
    text = httpx2.get(f"{served.url}/metrics").text
    assert 'odmoe_answers_total{finish="cancelled"}' in text
    assert "odmoe_answers_under_way 0.0" in text


def test_a_full_queue(served: Served) -> None:
    streams = [begun(served) for _ in range(2)]
    create: Any = served.client().completions.create
    waiting = [threading.Thread(target=create, kwargs=ASK | {"max_tokens": 1}) for _ in range(2)]
    for one in waiting:
        one.start()
    until(lambda: served.service.desk.taken == 4)
    with pytest.raises(openai.RateLimitError, match="the queue is full") as found:
        served.client().completions.create(**ASK)
    assert (found.value.code, found.value.type) == ("queue_full", "rate_limit_error")
    assert int(found.value.response.headers["retry-after"]) >= 1
    assert httpx2.get(f"{served.url}/health").status_code == 200
    for stream in streams:
        stream.close()
    for one in waiting:
        one.join(WAIT_S)
    assert served.client(max_retries=5).completions.create(**ASK, max_tokens=1).choices
    assert 'odmoe_refused_requests_total{reason="queue_full"}' in httpx2.get(f"{served.url}/metrics").text


def test_more_answers_than_places_are_given_in_turn(served: Served) -> None:
    until(lambda: is_idle(served))
    found = served.client().completions.create(**ASK, max_tokens=1, n=9)
    assert len(found.choices) == 9


def test_a_deadline(model: Model) -> None:
    with serving(model, request_timeout=0.5) as served:
        extra = {"ignore_eos": True}
        with pytest.raises(openai.InternalServerError) as found:
            served.client().completions.create(**ASK, max_tokens=900, extra_body=extra)
        assert (found.value.status_code, found.value.code) == (504, "deadline")
        stream = served.client().completions.create(**ASK, max_tokens=900, stream=True, extra_body=extra)
        with pytest.raises(openai.APIError, match="--request-timeout"):
            for _ in stream:
                pass
        until(lambda: is_idle(served))
        assert "finish=deadline" in served.lines[-1]


def test_a_drain(model: Model) -> None:
    """What is under way ends, what comes is refused, and the server ends."""
    with serving(model) as served:
        stream = served.client().completions.create(**ASK, max_tokens=40, stream=True)
        first = next(iter(stream)).choices[0].text
        served.server.stop()
        until(lambda: served.service.stopping)
        with pytest.raises(openai.InternalServerError, match="stopping") as found:
            served.client().completions.create(**ASK)
        assert (found.value.status_code, found.value.code) == (503, "stopping")
        assert httpx2.get(f"{served.url}/ready").status_code == 503
        assert httpx2.get(f"{served.url}/health").status_code == 200
        rest = list(stream)
        assert rest[-1].choices[0].finish_reason == "length"
        assert first
        until(lambda: bool(served.code))
        assert served.code == [0]


@pytest.mark.parametrize(("drain", "stops"), [(0.2, 1), (600.0, 2)])
def test_a_drain_that_ends_answers(model: Model, drain: float, stops: int) -> None:
    """After its time, or at once the second time: the stream ends with an error, not with a cut."""
    with serving(model, drain_timeout=drain) as served:
        stream = begun(served)
        for _ in range(stops):
            served.server.stop()
        with pytest.raises(openai.APIError, match="was stopped before the answer was complete"):
            for _ in stream:
                pass
        until(lambda: bool(served.code))
    assert served.code == [0]


def test_ready_and_health(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert httpx2.get(f"{served.url}/ready").json() == {"status": "ready"}

    def lost() -> None:
        raise MainNodeLostError("the main node is gone")

    monkeypatch.setattr(served.service.model.cluster, "figures", lost)
    found = httpx2.get(f"{served.url}/ready")
    assert (found.status_code, found.json()["why"]) == (503, "the main node is gone")
    assert httpx2.get(f"{served.url}/health").status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (MainNodeLostError("the main node is gone"), 503, "main_node_lost"),
        (NonFiniteError("logits are not finite"), 500, "request_failed"),
        (RuntimeError("a secret of the code"), 500, None),
        (Panic("a secret of a library"), 500, None),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("after", [0, 3])
def test_an_answer_that_fails(
    served: Served, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, code: str | None, after: int
) -> None:
    """Before the first token it is an HTTP error; within a stream, an event."""
    from odmoe.api.text_answer import TextAnswer

    whole = TextAnswer._read

    def failing(self: Any, *given: Any) -> Iterator[Any]:
        for number, piece in enumerate(whole(self, *given)):
            if number == after:
                raise error
            yield piece

    monkeypatch.setattr(TextAnswer, "_read", failing)
    client = served.client()
    with pytest.raises(openai.InternalServerError) as found:
        client.completions.create(**ASK, max_tokens=8)
    assert (found.value.status_code, found.value.code) == (status, code)
    assert "secret" not in str(found.value.body)
    kind = openai.InternalServerError if after == 0 else openai.APIError
    texts = []
    with pytest.raises(kind) as streamed:
        texts.extend(event.choices[0].text for event in client.completions.create(**ASK, max_tokens=8, stream=True))
    assert len("".join(texts)) > 0 or after == 0
    assert streamed.value.code == code
    until(lambda: is_idle(served))


def test_a_log_line(model: Model) -> None:
    secret = "Natalia told nobody"
    with serving(model, log_format="json") as served:
        found = served.client().completions.create(model=NAME, prompt=secret, max_tokens=3)
        with pytest.raises(openai.BadRequestError):
            served.client().completions.create(model=NAME, prompt=secret, temperature=-1)
        httpx2.get(f"{served.url}/health")
        httpx2.get(f"{served.url}/v1/a%0Ab")
        until(lambda: len(served.lines) == 3)
    line, wrong, nothing = map(json.loads, served.lines)
    assert found.id == f"cmpl-{line['id']}"
    assert (line["status"], line["tokens"], line["finish"], line["model"]) == (200, 3, "length", NAME)
    assert 0 < line["ttft_s"] <= line["total_s"]
    assert line["prompt_tokens"] == found.usage.prompt_tokens  # type: ignore[union-attr]
    assert (wrong["status"], wrong["finish"]) == (400, "invalid_value")
    assert (nothing["status"], nothing["path"]) == (404, "/v1/a%0Ab")
    assert secret not in str(served.lines)
    assert found.choices[0].text not in str(served.lines)
