"""What other servers' clients send beside what OpenAI's API has: accepted where it asks for nothing, else by `--strict`
refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest

from support.machines.http_service import WAIT_S, Served, serving

if TYPE_CHECKING:
    from openai import OpenAI

    from odmoe.api.model import Model

NAME = "demo-moe"
CHAT: list[Any] = [{"role": "user", "content": "hi"}]


def answer(client: OpenAI, change: dict[str, Any]) -> str:
    asked: dict[str, Any] = {"messages": CHAT, "max_tokens": 6} | change
    found = client.chat.completions.create(model=NAME, messages=asked.pop("messages"), extra_body=asked)
    return found.choices[0].message.content or ""


@pytest.fixture(scope="module")
def plain(client: OpenAI) -> str:
    return answer(client, {})


@pytest.fixture(scope="module")
def strict(model: Model) -> Iterator[Served]:
    with serving(model, strict=True) as made:
        yield made


NOTHING: dict[str, dict[str, Any]] = {
    "numbers": {"seed": -1, "top_k": -1, "min_p": 0, "n": None, "repetition_penalty": 1.0, "mirostat": 0},
    "texts": {"stop": "", "suffix": "", "guided_json": None, "grammar": ""},
    "lists": {"stop": ["", "never is this said"], "functions": [], "tools": [], "bad_words": []},
    "both limits": {"max_completion_tokens": 6},
    "switches": {"stream_options": {"include_usage": True}, "top_logprobs": 0, "logprobs": False, "store": True},
    "unknown": {"num_ctx": 4096, "response_format": {"type": "text", "colour": "red"}},
}


@pytest.mark.parametrize("name", NOTHING)
def test_what_asks_for_nothing(client: OpenAI, plain: str, name: str) -> None:
    assert answer(client, NOTHING[name]) == plain


def test_no_limit_is_as_none(client: OpenAI) -> None:
    """A stop text ends what would go on to the end of the context."""
    asked = {"max_tokens": -1, "stop": [","]}
    assert answer(client, asked) == answer(client, asked | {"max_tokens": 100})
    found = client.completions.create(model=NAME, prompt="Natalia", stop=["\n"], max_tokens=-1)
    assert found.choices[0].finish_reason == "stop"


def test_a_message_of_another_servers_answer(client: OpenAI) -> None:
    """Its fields that are no part of a chat, and content that is null."""
    replayed = {"annotations": [], "reasoning": None, "refusal": None, "tool_calls": [], "provider": "x"}
    mine = [*CHAT, {"role": "assistant", "content": "yes"}, *CHAT]
    with_more = [*CHAT, {"role": "assistant", "content": "yes", **replayed}, *CHAT]
    assert answer(client, {"messages": with_more}) == answer(client, {"messages": mine})
    without = [*CHAT, {"role": "assistant", "content": None}, *CHAT]
    assert answer(client, {"messages": without})


def test_unknown_fields_are_named_once(model: Model) -> None:
    lines: list[str] = []
    with serving(model) as served, served.client() as client:
        served.service.notify = lines.append
        for _ in range(2):
            answer(client, {"max_token": 3, "response_format": {"type": "text", "colour": "red"}})
            answer(client, {"messages": [{**CHAT[0], "mood\x1b[1m": "merry"}]})
    assert sorted(line.split(",")[0] for line in lines) == [
        "requests have the field max_token",
        r"requests have the field messages.mood\x1b[1m",
        "requests have the field response_format.colour",
    ]
    assert "did you mean max_tokens" in lines[0]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_token": 2}, "max_token is not a parameter that is known here; did you mean max_tokens or .*"),
    ({"response_format": {"type": "text", "colour": "red"}}, "response_format.colour is not a parameter .*"),
    ({"messages": [{**CHAT[0], "mood": "merry"}]}, "messages.*mood is not .*"),
    ({"seed": -1}, "seed: .*"),
    ({"stop": ""}, "stop: .*"),
    ({"stream_options": {"include_usage": True}}, "stream_options is given without stream.*"),
]


@pytest.mark.parametrize(("change", "says"), REFUSED, ids=lambda value: str(value)[:40])
def test_strict_refuses(strict: Served, change: dict[str, Any], says: str) -> None:
    with strict.client() as client, pytest.raises(openai.BadRequestError, match=says):
        answer(client, change)


@pytest.mark.parametrize(
    "body",
    [
        ("/v1/responses", {"input": "hi", "mood": 1}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 2, "mood": 1}),
        ("/api/chat", {"messages": CHAT, "mood": 1}),
        ("/tokenize", {"prompt": "hi", "mood": 1}),
    ],
    ids=lambda body: body[0],
)
def test_strict_refuses_in_every_api(strict: Served, body: tuple[str, dict[str, Any]]) -> None:
    path, asked = body
    found = httpx2.post(f"{strict.url}{path}", json={"model": NAME, **asked}, timeout=WAIT_S)
    assert found.status_code == 400
    assert "mood is not a parameter that is known here" in found.text
