"""What a client meets that leaves, comes at a bad time, or asks too much."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest

from odmoe.serve.access_log import AccessLog, Record
from scheduler.errors import MainNodeLostError, NonFiniteError
from support.cases import slow_except
from support.machines.gated_answers import begun, gated
from support.machines.http_service import WAIT_S, Served, demo_model, is_idle, request_bytes, serving, until

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


def pool_threads() -> int:
    """Of every service in this process: those of ended ones may be about to end."""
    return sum(one.name.startswith("odmoe-request") for one in threading.enumerate())


def strangers(known: set[threading.Thread]) -> list[str]:
    """Threads that have begun since, but those of pools."""
    pools = ("odmoe-request", "odmoe-ready", "odmoe-scrape", "asyncio_")
    return [one.name for one in threading.enumerate() if one not in known and not one.name.startswith(pools)]


@pytest.mark.slow
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
    assert pool_threads() - pools <= served.service.answer_pool.places
    assert served.client().completions.create(**ASK, max_tokens=2).choices[0].text


def test_a_client_that_has_gone_is_noted(served: Served) -> None:
    before, count = len(served.lines), "odmoe_answers_total"
    ended = served.counted(count, finish="cancelled")
    with gated() as gate:
        begun(served, gate).close()
        until(lambda: any("finish=cancelled" in line for line in served.lines[before:]))
    until(lambda: is_idle(served))
    assert served.counted(count, finish="cancelled") == ended + 1
    assert served.counted("odmoe_answers_under_way") == 0


def test_a_full_queue(served: Served) -> None:
    refused = served.counted("odmoe_refused_requests_total", reason="queue_full")
    with gated() as gate:
        streams = [begun(served, gate) for _ in range(2)]
        create: Any = served.client().completions.create
        waiting = [threading.Thread(target=create, kwargs=ASK | {"max_tokens": 1}) for _ in range(2)]
        for one in waiting:
            one.start()
        until(lambda: served.service.answer_pool.busy_threads == 4)
        with pytest.raises(openai.RateLimitError, match="the queue is full") as found:
            served.client().completions.create(**ASK)
        assert (found.value.code, found.value.type) == ("queue_full", "rate_limit_error")
        assert int(found.value.response.headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError):
            served.client().completions.create(**ASK, stream=True)
        assert httpx2.get(f"{served.url}/health").status_code == 200
        assert served.counted("odmoe_refused_requests_total", reason="queue_full") == refused + 2
        for stream in streams:
            stream.close()
    for one in waiting:
        one.join(WAIT_S)
    until(lambda: is_idle(served))
    assert served.client().completions.create(**ASK, max_tokens=1).choices


@pytest.mark.slow
def test_more_answers_than_places_are_given_in_turn(served: Served) -> None:
    until(lambda: is_idle(served))
    found = served.client().completions.create(**ASK, max_tokens=1, n=9)
    assert len(found.choices) == 9


@pytest.mark.slow
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


@pytest.mark.parametrize("stream", slow_except([True], [False, True]))
def test_a_deadline(model: Model, stream: bool) -> None:
    """Of an answer that never ends, and of one that never begins."""
    with gated() as gate, serving(model, request_timeout=0.5) as served:
        for tokens in (0, 1):
            gate.let(tokens)
            with pytest.raises(openai.APIError, match="--request-timeout") as found:
                for _ in served.client(max_retries=1).completions.create(**ASK, max_tokens=900, stream=stream):
                    pass
            assert found.value.code == "deadline"
        until(lambda: is_idle(served))
        begun = served.counted("odmoe_answers_total", finish="deadline")
        unread = served.counted("odmoe_refused_requests_total", reason="deadline")
        assert begun + unread == 2, "the client did not try again"
        assert "finish=deadline" in served.lines[-1]


def test_the_client_is_told_not_to_have_a_whole_answer_computed_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def failing(self: Any, *given: Any) -> Iterator[Any]:
        asked.append(self)
        raise NonFiniteError("logits are not finite")
        yield

    monkeypatch.setattr("odmoe.api.text_answer.TextAnswer._read", failing)
    with pytest.raises(openai.InternalServerError) as found:
        served.client(max_retries=3).completions.create(**ASK)
    assert found.value.response.headers["x-should-retry"] == "false"
    assert len(asked) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_whole_before_its_report_is_there(served: Served, stream: bool) -> None:
    """The main node may wait for the shadow's last predictions; the client does not."""
    until(lambda: is_idle(served))
    ended = served.counted("odmoe_answers_total", finish="length")
    with gated() as gate:
        gate.open()
        gate.reports.clear()
        found: Any = served.client().completions.create(**ASK, max_tokens=3, n=2, stream=stream)
        events = list(found) if stream else [found]
        finishes = [choice.finish_reason for event in events for choice in event.choices]
        assert finishes.count("length") == 2
        number = events[0].id.removeprefix("cmpl-")
        assert served.service.under_way
        assert not [line for line in served.lines if number in line]
        assert served.counted("odmoe_answers_total", finish="length") == ended
        gate.reports.set()
        until(lambda: any(number in line for line in served.lines))
    (line,) = [line for line in served.lines if number in line]
    assert " tokens=6 " in line
    assert line.endswith("finish=length")
    assert served.counted("odmoe_answers_total", finish="length") == ended + 2
    until(lambda: is_idle(served))


def test_the_ends_of_many_answers_are_one_word_each_in_the_log() -> None:
    record = Record("id", "POST", "/v1/completions")
    for number in range(50):
        record.on_answered(("stop", "length")[number % 2], None)
    assert record.facts()["finish"] == "length,stop"
    for recall, tokens in ((0.5, 10), (1.0, 30)):
        record.on_answered("stop", SimpleNamespace(recall=recall, new_tokens=tokens))  # type: ignore[arg-type]
    assert record.facts()["recall"] == 0.875


def test_the_total_time_is_that_to_the_last_byte() -> None:
    """What follows it, such as the wait for the recall, is not the client's."""
    lines: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await asyncio.sleep(0.02)
        await send({"type": "http.response.body", "body": b""})
        await asyncio.sleep(0.5)

    async def send(message: Any) -> None:
        pass

    log = AccessLog(app, lambda line: None, lambda facts: lines.append(facts) or "")  # type: ignore[func-returns-value]
    asyncio.run(log({"type": "http", "method": "GET", "path": "/v1/models"}, None, send))  # type: ignore[arg-type]
    assert 0.01 < lines[0]["total_s"] < 0.4


def test_a_log_line(model: Model) -> None:
    secret = "Natalia told nobody"
    with serving(model, log_format="json") as served:
        found = served.client().completions.create(model=NAME, prompt=secret, max_tokens=3)
        with pytest.raises(openai.BadRequestError):
            served.client().completions.create(model=NAME, prompt=secret, temperature=-1)
        httpx2.get(f"{served.url}/health")
        httpx2.get(f"{served.url}/v1/a%0Ab")
        until(lambda: len(served.lines) == 3)
    # The line of an answer waits for the shadow, and may come after those of later requests.
    line, wrong, nothing = sorted(map(json.loads, served.lines), key=lambda one: one["status"])
    assert found.id == f"cmpl-{line['id']}"
    assert (line["status"], line["tokens"], line["finish"], line["model"]) == (200, 3, "length", NAME)
    assert 0 < line["ttft_s"] <= line["total_s"]
    assert line["prompt_tokens"] == found.usage.prompt_tokens  # type: ignore[union-attr]
    assert (wrong["status"], wrong["finish"]) == (400, "invalid_value")
    assert (nothing["status"], nothing["path"]) == (404, "/v1/a%0Ab")
    assert secret not in str(served.lines)
    assert found.choices[0].text not in str(served.lines)
