"""/v1/messages, by its definition. By its official client: tests/system/clients."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from odmoe.serve.anthropic.request import read_messages
from odmoe.serve.openai.requests import ChatRequest
from odmoe.serve.request_fields import UnknownFields
from support.machines.http_service import WAIT_S

if TYPE_CHECKING:
    from openai import OpenAI

    from support.machines.http_service import Served

ASK: dict[str, Any] = {"model": "demo-moe", "max_tokens": 6, "messages": [{"role": "user", "content": "hi"}]}


def ask(served: Served, path: str = "/v1/messages", **change: Any) -> httpx2.Response:
    return httpx2.post(f"{served.url}{path}", json=ASK | change, timeout=WAIT_S)


def test_results_are_messages_of_their_own() -> None:
    messages = [
        {"role": "user", "content": "add"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I add.", "signature": ""},
                {"type": "text", "text": "Yes."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "3"}]},
                {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    found = read_messages(ASK | {"messages": messages, "system": "Be brief."}, UnknownFields(True, print)).request
    assert isinstance(found, ChatRequest)
    assert [one["role"] for one in found.messages] == ["system", "user", "assistant", "tool", "user"]
    assert found.messages[2]["reasoning_content"] == "I add."
    assert json.loads(found.messages[2]["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    assert (found.messages[3]["tool_call_id"], found.messages[3]["content"]) == ("t1", "3")


def test_the_answer_is_that_of_the_chat(served: Served, client: OpenAI) -> None:
    expected = client.chat.completions.create(model="demo-moe", messages=ASK["messages"], max_tokens=6)
    whole = ask(served).json()
    assert whole["content"] == [{"type": "text", "text": expected.choices[0].message.content}]
    assert whole["stop_reason"] == "max_tokens"
    assert expected.usage is not None
    assert whole["usage"]["input_tokens"] == expected.usage.prompt_tokens
    events = [json.loads(line[6:]) for line in ask(served, stream=True).text.splitlines() if line.startswith("data: ")]
    kinds = [one["type"] for one in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    texts = [one["delta"]["text"] for one in events if one["type"] == "content_block_delta"]
    assert "".join(texts) == whole["content"][0]["text"]
    counted = ask(served, "/v1/messages/count_tokens").json()
    assert counted == {"input_tokens": expected.usage.prompt_tokens}


def test_a_stop_sequence(served: Served) -> None:
    text = ask(served).json()["content"][0]["text"]
    found = ask(served, stop_sequences=[text[4:6]], max_tokens=20).json()
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", text[4:6])
    assert found["content"][0]["text"] == text[: text.index(text[4:6])]


REFUSED: list[tuple[dict[str, Any], int, str, str]] = [
    ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens is missing"),
    ({"model": "claude"}, 404, "not_found_error", "'claude' does not exist"),
    ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, 400, "invalid_request_error", "tools.0.type"),
    ({"mcp_servers": [{"url": "x"}]}, 400, "invalid_request_error", "mcp_servers is not supported"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        *(400, "invalid_request_error", "messages.0.content.0 has type 'image'"),
    ),
    (
        {"messages": [{"role": "user", "content": "hi " * 3000}]},
        *(400, "invalid_request_error", "prompt is too long: This model's maximum context length is 1024 tokens"),
    ),
]


@pytest.mark.parametrize(("change", "status", "kind", "says"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_done_is_refused_by_name(
    served: Served, change: dict[str, Any], status: int, kind: str, says: str
) -> None:
    found = ask(served, **change)
    assert found.status_code == status
    body = found.json()
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert says in body["error"]["message"]
    assert body["request_id"] == found.headers["x-request-id"]
