"""`odmoe.connect` with a server that does what it is told, wrong things too."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import odmoe
from scheduler.errors import (
    ClusterError,
    ConfigError,
    DeadlineError,
    LinkError,
    MainNodeLostError,
    PromptError,
    ProtocolError,
    QueueFullError,
    RequestCancelledError,
    RequestError,
    RequestFailedError,
    SecretError,
)

MODELS = {"object": "list", "data": [{"id": "demo-moe", "object": "model"}, {"id": "other", "object": "model"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}
LIMIT_S = 60.0


class Told(BaseHTTPRequestHandler):
    """Answers with what the test has put into `script`: a function of this handler and the request's body."""

    protocol_version = "HTTP/1.1"
    server: Any

    def do_GET(self) -> None:
        self.server.keys.append(self.headers.get("Authorization"))
        self.whole(*self.server.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        self.server.script(self)

    def whole(self, status: int, body: Any, **headers: str) -> None:
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(text)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(text)

    def begin(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

    def events(self, *events: Any) -> None:
        self.begin()
        self.more(*events)

    def more(self, *events: Any) -> None:
        for event in events:
            data = event if isinstance(event, str) else json.dumps(event)
            self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def drop(self) -> None:
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def gone(self) -> bool:
        """Whether the client closes its end, within `LIMIT_S`."""
        self.connection.settimeout(LIMIT_S)
        try:
            return self.connection.recv(1) == b""
        except ConnectionError:
            return True

    def log_message(self, format: str, *values: Any) -> None:
        """Nothing."""


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Told)
        self.models: tuple[int, Any] = (200, MODELS)
        self.keys: list[str | None] = []
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.script: Callable[[Told], None] = lambda handler: handler.whole(500, {})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield found
        found.shutdown()
        thread.join(LIMIT_S)


@pytest.fixture
def served(server: Server) -> Iterator[odmoe.ServedModel]:
    with odmoe.connect(server.url, timeout=LIMIT_S) as model:
        yield model


def text(piece: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece, "logprobs": None, "finish_reason": finish}]}


def whole(handler: Told) -> None:
    handler.events(text("to"), text(" be", "length"), USAGE, "[DONE]")


def test_an_answer_and_what_was_asked(server: Server, served: odmoe.ServedModel) -> None:
    server.script = whole
    found = served.generate(
        "HAMLET:",
        max_new_tokens=2,
        temperature=0.5,
        seed=3,
        stop=["a", "b"],
        logit_bias={5: -1.0},
        schema={"type": "object"},
        top_p=None,
    )
    assert (found.text, found.finish, found.prompt_tokens, found.new_tokens) == ("to be", "length", 3, 2)
    assert found.token_ids is None
    assert found.report is None
    assert server.asked == [
        (
            "/v1/completions",
            {
                "model": "demo-moe",
                "stream": True,
                "stream_options": {"include_usage": True},
                "prompt": "HAMLET:",
                "max_tokens": 2,
                "temperature": 0.5,
                "seed": 3,
                "stop": ["a", "b"],
                "logit_bias": {"5": -1.0},
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}},
                },
            },
        )
    ]


def test_a_chat_with_log_probabilities(server: Server, served: odmoe.ServedModel) -> None:
    entry = {"token": "to", "logprob": -0.5, "top_logprobs": [{"token": "to", "logprob": -0.5}]}
    server.script = lambda handler: handler.events(
        {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
        {"choices": [{"delta": {"content": "to"}, "logprobs": {"content": [entry]}, "finish_reason": None}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        USAGE,
        "[DONE]",
    )
    messages = [{"role": "user", "content": "Hello"}]
    found = served.chat(messages, logprobs=1)
    assert found.text == "to"
    assert found.logprobs == [odmoe.Logprob("to", -0.5, top=(odmoe.Alternative("to", -0.5),))]
    path, body = server.asked[0]
    assert path == "/v1/chat/completions"
    assert body["messages"] == messages
    assert (body["logprobs"], body["top_logprobs"]) == (True, 1)
    assert not {"max_tokens", "max_completion_tokens", "temperature", "stop", "seed"} & set(body), (
        "as the server has it"
    )


def test_log_probabilities_of_a_completion(server: Server, served: odmoe.ServedModel) -> None:
    logprobs = {"tokens": ["to"], "token_logprobs": [-2.0], "top_logprobs": [{"a": -0.1, "to": -2.0}]}
    server.script = lambda handler: handler.events(
        {"choices": [{"text": "to", "logprobs": logprobs, "finish_reason": "length"}]}, USAGE, "[DONE]"
    )
    found = served.generate([1, 2], logprobs=1)
    assert found.logprobs == [odmoe.Logprob("to", -2.0, top=(odmoe.Alternative("a", -0.1),))]
    assert server.asked[0][1]["prompt"] == [1, 2]


def test_for_asyncio(server: Server, served: odmoe.ServedModel) -> None:
    server.script = whole

    async def ask() -> list[str]:
        return [str(chunk) async for chunk in served.astream("HAMLET:")]

    assert asyncio.run(ask()) == ["to", " be"]


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (400, {"message": "too hot", "param": "temperature"}, ConfigError),
        (400, {"message": "too long", "code": "context_length_exceeded"}, PromptError),
        (400, {"message": "empty", "param": "prompt"}, PromptError),
        (400, {"message": "no template", "param": "messages", "code": "no_chat_template"}, ConfigError),
        (400, {"message": "refused", "param": "messages", "code": "invalid_value"}, ConfigError),
        (400, {"message": "bad", "param": "prompt", "code": "unsupported_parameter"}, ConfigError),
        (400, {"message": "bad", "code": "unknown_parameter"}, ConfigError),
        (400, {"message": "bad", "code": "missing_required_parameter"}, ConfigError),
        (400, {"message": "empty", "code": "invalid_prompt"}, PromptError),
        (400, {"message": "something else"}, RequestError),
        (401, {"message": "wrong key"}, SecretError),
        (401, {"message": "wrong key", "code": "invalid_api_key"}, SecretError),
        (403, {"message": "not for you"}, SecretError),
        (404, {"message": "no such model", "code": "model_not_found"}, ConfigError),
        (404, {"message": "no such route", "code": "no_route"}, ConfigError),
        (413, {"message": "too large"}, PromptError),
        (422, {"message": "of another kind"}, ConfigError),
        (429, {"message": "the queue is full", "code": "queue_full"}, QueueFullError),
        (500, {"message": "a defect"}, RequestFailedError),
        (500, {"message": "no worker", "code": "request_failed"}, RequestFailedError),
        (503, {"message": "not ready"}, ClusterError),
        (503, {"message": "ending", "code": "stopping"}, ClusterError),
        (503, {"message": "no node", "code": "cluster_unavailable"}, ClusterError),
        (503, {"message": "gone", "code": "main_node_lost"}, MainNodeLostError),
        (503, {"message": "given up", "code": "cancelled"}, RequestCancelledError),
        (504, {"message": "late"}, DeadlineError),
        (504, {"message": "late", "code": "deadline"}, DeadlineError),
    ],
)
def test_refusals(
    server: Server, served: odmoe.ServedModel, status: int, error: dict[str, str], kind: type[Exception]
) -> None:
    server.script = lambda handler: handler.whole(status, {"error": error}, Retry_After="7")
    with pytest.raises(kind, match=error["message"] + r" \(try again after 7 s\)") as caught:
        served.generate("HAMLET:")
    assert type(caught.value) is kind


def test_an_error_within_the_stream(server: Server, served: odmoe.ServedModel) -> None:
    error = {"error": {"message": "the main node is gone", "type": "server_error", "code": "main_node_lost"}}
    server.script = lambda handler: handler.events(text("to"), error)
    stream = served.stream("HAMLET:")
    assert str(next(stream)) == "to"
    with pytest.raises(MainNodeLostError, match="the main node is gone"):
        next(stream)


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        (lambda it: it.events(text("to")), LinkError, "ended the answer after 1 chunks"),
        (lambda it: it.events(text("to"), "[DONE]"), LinkError, "ended the answer after 1 chunks"),
        (lambda it: it.drop(), LinkError, "the connection to"),
        (lambda it: it.events("{"), ProtocolError, "not JSON"),
        (lambda it: it.events("[]"), ProtocolError, "not an object"),
        (lambda it: it.events({"choices": [{"text": 5}]}), ProtocolError, "not one of the OpenAI API"),
        (lambda it: it.whole(200, {"choices": []}), ProtocolError, "cannot be read"),
        (lambda it: it.whole(502, b"<html>"), ProtocolError, "502 Bad Gateway without an error of the OpenAI API"),
    ],
)
def test_what_is_no_answer(
    server: Server,
    served: odmoe.ServedModel,
    script: Callable[[Told], None],
    kind: type[Exception],
    message: str,
) -> None:
    server.script = script
    with pytest.raises(kind, match=message):
        served.generate("HAMLET:")


def test_silence_has_a_deadline(server: Server) -> None:
    server.script = lambda handler: (handler.events(text("to")), handler.gone())[0]
    with odmoe.connect(server.url, timeout=0.2) as model, pytest.raises(DeadlineError, match="a longer timeout"):
        model.generate("HAMLET:")


@pytest.mark.parametrize("begun", [False, True])
def test_comments_are_no_tokens(server: Server, begun: bool) -> None:
    """A server that only says that it is there has the same deadline."""

    def script(handler: Told) -> None:
        handler.events(*[text("to")] * begun)
        with contextlib.suppress(OSError):  # the client has gone
            for _ in range(int(LIMIT_S / 0.02)):
                handler.wfile.write(b": ping\n\n")
                time.sleep(0.02)

    server.script = script
    with odmoe.connect(server.url, timeout=0.3) as model, pytest.raises(DeadlineError, match="sent no token for"):
        model.generate("HAMLET:")


def test_a_cancelled_answer_ends_its_connection(server: Server, served: odmoe.ServedModel) -> None:
    """Also where nothing has come yet, from another thread and from a task."""
    gone = threading.Semaphore(0)
    silent = threading.Event()

    def script(handler: Told) -> None:
        if len(server.asked) == 1:
            handler.events(text("to"))
        silent.set()
        if handler.gone():
            gone.release()

    server.script = script
    stream = served.stream("HAMLET:")
    next(stream)
    canceller = threading.Thread(target=stream.cancel)
    canceller.start()
    with pytest.raises(RequestCancelledError):
        next(stream)
    canceller.join()
    assert gone.acquire(timeout=LIMIT_S)

    async def ask() -> None:
        silent.clear()
        task = asyncio.create_task(served.agenerate("HAMLET:"))
        await asyncio.to_thread(silent.wait, LIMIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(ask())
    assert gone.acquire(timeout=LIMIT_S)


def test_one_that_was_given_up_before_it_began_is_never_sent(server: Server, served: odmoe.ServedModel) -> None:
    with served.stream("HAMLET:") as stream:
        stream.cancel()
        with pytest.raises(RequestCancelledError):
            next(stream)
    assert list(stream) == []
    assert server.asked == []


def test_the_end_of_a_connection_gives_its_answers_up(server: Server) -> None:
    """Whoever waits for a chunk hears of it, whoever asks later too, and the server."""
    gone, waits = threading.Semaphore(0), threading.Event()

    def script(handler: Told) -> None:
        handler.events(text("to"))
        waits.set()
        if handler.gone():
            gone.release()

    server.script = script
    model = odmoe.connect(server.url)
    stream, other = model.stream("HAMLET:"), model.stream("ROMEO:")
    errors: list[Exception] = []

    def read() -> None:
        try:
            list(stream)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert waits.wait(LIMIT_S)
    model.close()
    reader.join(LIMIT_S)
    assert [type(error) for error in errors] == [RequestCancelledError]
    assert gone.acquire(timeout=LIMIT_S)
    with pytest.raises(RequestCancelledError):
        next(other)
    with pytest.raises(ClusterError, match="was closed"):
        model.stream("HAMLET:")
    assert len(server.asked) == 1


def test_the_end_of_a_with_block_ends_its_connection(server: Server, served: odmoe.ServedModel) -> None:
    gone = threading.Event()

    def script(handler: Told) -> None:
        handler.events(text("to"))
        if handler.gone():
            gone.set()

    server.script = script
    with served.stream("HAMLET:") as stream:
        next(stream)
    assert gone.wait(LIMIT_S)


def test_connecting(server: Server) -> None:
    with odmoe.connect(server.url + "/v1/", "a key", model="other") as model:
        assert (model.name, model.url) == ("other", server.url)
    assert server.keys == ["Bearer a key"]
    with pytest.raises(ClusterError, match=r"the connection to .* was closed"):
        model.generate("HAMLET:")
    with pytest.raises(ConfigError, match=r"model is 'third'; .* has: demo-moe, other"):
        odmoe.connect(server.url, model="third")
    wrong: list[Any] = ["127.0.0.1:8000", "ftp://host", "", 5, None, b"http://host"]
    for url in wrong:
        with pytest.raises(ConfigError, match="allowed: http://host:port"):
            odmoe.connect(url)
    for timeout in (0, -1, float("nan"), float("inf"), "long", None, True):
        with pytest.raises(ConfigError, match=r"timeout is .*; allowed: a number of seconds above 0"):
            odmoe.connect(server.url, timeout=timeout)  # type: ignore[arg-type]
    for key in (5, b"key", "two\nlines", "schl\u00fcssel"):
        with pytest.raises(ConfigError, match="api_key is not valid") as caught:
            odmoe.connect(server.url, key)  # type: ignore[arg-type]
        assert str(key) not in str(caught.value)


@pytest.mark.parametrize(
    ("models", "kind", "message"),
    [
        ((401, {"error": {"message": "the key is wrong"}}), SecretError, "the key is wrong"),
        ((200, {"data": []}), ProtocolError, "has no model"),
        ((200, {"models": []}), ProtocolError, "not that of a server with the OpenAI API"),
        ((200, b"<html>"), ProtocolError, "not that of a server with the OpenAI API"),
        ((404, b"nothing"), ProtocolError, "404 Not Found without an error"),
    ],
)
def test_what_is_no_server_of_models(
    server: Server, models: tuple[int, Any], kind: type[Exception], message: str
) -> None:
    server.models = models
    with pytest.raises(kind, match=message):
        odmoe.connect(server.url)


def test_nobody_listens(server: Server) -> None:
    url = server.url
    server.shutdown()
    server.server_close()
    with pytest.raises(LinkError, match="start one there with odmoe serve"):
        odmoe.connect(url)


def test_options_of_a_loaded_model_alone(served: odmoe.ServedModel) -> None:
    for options in ({"sample": True}, {"prompt_logprobs": 2}):
        with pytest.raises(ConfigError, match="which a served model does not have"):
            served.generate("HAMLET:", **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="schema is not valid JSON"):
        served.generate("HAMLET:", schema="{")
