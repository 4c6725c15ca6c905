"""/v1/chat/completions: answers that follow a JSON schema."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema
import openai
import pytest

from support.cases import slow_except
from support.chats.answers import SCHEMA

if TYPE_CHECKING:
    from openai import OpenAI


def answer(client: OpenAI, **asked: Any) -> Any:
    chat: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    return client.chat.completions.create(model="demo-moe", messages=chat, **({"max_completion_tokens": 8} | asked))


@pytest.mark.parametrize("stream", slow_except([True], [False, True]))
def test_an_answer_follows_a_json_schema(client: OpenAI, stream: bool) -> None:
    """The penalty keeps the small model from blanks without end."""
    asked = {"type": "json_schema", "json_schema": {"name": "found", "schema": SCHEMA, "strict": True}}
    found = answer(client, response_format=asked, max_completion_tokens=120, frequency_penalty=2.0, stream=stream)
    if stream:
        events = list(found)
        text = "".join(event.choices[0].delta.content or "" for event in events)
        finish = events[-1].choices[0].finish_reason
    else:
        text, finish = found.choices[0].message.content, found.choices[0].finish_reason
    assert finish == "stop"
    jsonschema.validate(json.loads(text), SCHEMA)


def test_an_answer_that_is_a_json_object(client: OpenAI) -> None:
    """Cut short by its length, it is the beginning of one."""
    plain = answer(client, max_completion_tokens=4).choices[0].message.content
    text = answer(client, response_format={"type": "json_object"}, max_completion_tokens=4).choices[0].message.content
    assert text.startswith("{")
    assert not plain.startswith("{")


def test_a_schema_that_cannot_be_followed(client: OpenAI) -> None:
    wrong = {"type": "json_schema", "json_schema": {"name": "found", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError, match="the schema is refused"):
        answer(client, response_format=wrong)
