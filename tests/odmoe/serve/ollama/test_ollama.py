"""ollama's routes, by its documentation. By its official client: tests/system/clients."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from odmoe.serve.ollama.events import Lines
from odmoe.serve.ollama.request import read_chat
from odmoe.serve.request_fields import UnknownFields
from odmoe.serve.translated import Head
from odmoe.serve.writers import Ending
from support.machines.http_service import WAIT_S

if TYPE_CHECKING:
    from openai import OpenAI

    from support.machines.http_service import Served

CHAT: list[Any] = [{"role": "user", "content": "hi"}]
SIX = {"num_predict": 6}


def ask(served: Served, path: str, **asked: Any) -> httpx2.Response:
    return httpx2.post(f"{served.url}{path}", json={"model": "demo-moe:latest", **asked}, timeout=WAIT_S)


def test_the_answer_is_that_of_the_chat(served: Served, client: OpenAI) -> None:
    expected = client.chat.completions.create(model="demo-moe", messages=CHAT, max_tokens=6)
    whole = ask(served, "/api/chat", messages=CHAT, options=SIX, stream=False).json()
    assert whole["message"] == {"role": "assistant", "content": expected.choices[0].message.content}
    assert (whole["model"], whole["done"], whole["done_reason"]) == ("demo-moe:latest", True, "length")
    assert whole["eval_count"] == 6
    assert 0 < whole["prompt_eval_duration"] < whole["total_duration"]
    streamed = ask(served, "/api/chat", messages=CHAT, options=SIX)
    assert streamed.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in streamed.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == whole["message"]["content"]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    alone = ask(served, "/api/generate", prompt="hi", options=SIX, stream=False).json()
    assert alone["response"] == whole["message"]["content"]


def test_a_raw_prompt_is_continued(served: Served, client: OpenAI) -> None:
    expected = client.completions.create(model="demo-moe", prompt="Natalia", max_tokens=6).choices[0].text
    found = ask(served, "/api/generate", prompt="Natalia", raw=True, options=SIX, stream=False).json()
    assert found["response"] == expected


@pytest.mark.parametrize("more", [{}, {"keep_alive": 0}, {"keep_alive": "5m", "stream": False}])
def test_without_a_prompt_the_model_is_loaded(served: Served, more: dict[str, Any]) -> None:
    """The shapes of ollama's documentation: one object, stream or not. The model stays, whatever `keep_alive` says."""
    head = {"model": "demo-moe:latest", "done": True, "done_reason": "load"}
    message = {"message": {"role": "assistant", "content": ""}}
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("/api/generate", {}, {"response": ""}),
        ("/api/generate", {"prompt": "", "system": "be brief"}, {"response": ""}),
        ("/api/chat", {}, message),
        ("/api/chat", {"messages": []}, message),
    ]
    for path, asked, expected in cases:
        found = ask(served, path, **asked, **more)
        assert found.status_code == 200
        (answer,) = (json.loads(line) for line in found.text.splitlines())
        assert answer.pop("created_at").endswith("Z")
        assert answer == head | expected
    assert ask(served, "/api/chat", **{"model": "llama3", **more}).status_code == 404


def test_calls_and_results() -> None:
    """ollama's have no ids; they belong together by name and order."""
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        *CHAT,
        {"role": "assistant", "content": "", "tool_calls": [call, {"function": {"name": "sub", "arguments": {}}}]},
        {"role": "tool", "tool_name": "sub", "content": "0"},
        {"role": "tool", "content": "3"},
    ]
    found: Any = read_chat({"model": "m", "messages": messages}, UnknownFields(True, print)).request
    first, second = (one["id"] for one in found.messages[1]["tool_calls"])
    assert [one["tool_call_id"] for one in found.messages[2:]] == [second, first]
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_calls_in_pieces_are_whole() -> None:
    lines = Lines(Head("x", "m", 3), is_chat=True)
    for piece in ({"name": "add", "arguments": '{"a"'}, {"arguments": ": 1}"}):
        assert lines.on_delta({"tool_calls": [{"index": 0, "function": piece}]}) == b""
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    called, last = (json.loads(line) for line in lines.on_end(Ending("tool_calls", False, 0.0), usage).splitlines())
    assert called["message"]["tool_calls"] == [{"function": {"name": "add", "arguments": {"a": 1}}}]
    assert (last["done"], last["done_reason"]) == (True, "stop")


def test_what_it_tells_of_the_model(served: Served) -> None:
    (model,) = httpx2.get(f"{served.url}/api/tags").json()["models"]
    manifest = served.service.model.opened.store.manifest
    assert model["name"] == "demo-moe"
    assert model["size"] > manifest.expert_bytes
    assert httpx2.get(f"{served.url}/api/ps").json()["models"][0]["context_length"] == 1024
    shown = ask(served, "/api/show").json()
    assert shown["model_info"]["mixtral.context_length"] == 1024
    assert shown["capabilities"] == ["completion"], "its template knows no tools"


@pytest.mark.parametrize(
    ("path", "asked", "status", "says"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aa"]}]}, 400, "messages.0.images"),
        ("/api/chat", {"messages": CHAT, "options": {"mirostat": 2}}, 400, "options.mirostat is not supported"),
        ("/api/chat", {"messages": CHAT, "options": {"top_p": 7}}, 400, "options.top_p"),
        ("/api/generate", {"prompt": "x", "context": [1]}, 400, "context is not supported"),
        ("/api/chat", {"model": "llama3", "messages": CHAT}, 404, "'llama3' does not exist"),
        ("/api/pull", {}, 404, "/api/pull is not supported"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    served: Served, path: str, asked: dict[str, Any], status: int, says: str
) -> None:
    found = ask(served, path, **asked)
    assert found.status_code == status
    assert says in found.json()["error"]
