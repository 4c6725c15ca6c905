"""/v1/responses, by the official client. With tools: tests/system/clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from odmoe.serve.openai.requests import ChatRequest
from odmoe.serve.request_fields import UnknownFields
from odmoe.serve.responses.events import ResponseEvents
from odmoe.serve.responses.request import read_response
from odmoe.serve.translated import Head
from odmoe.serve.writers import Ending

if TYPE_CHECKING:
    from openai import OpenAI

NAME = "demo-moe"
ITEMS: list[Any] = [
    {"role": "user", "content": [{"type": "input_text", "text": "add"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I add."}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes.", "annotations": []}]},
    {"type": "function_call", "call_id": "1", "name": "add", "arguments": '{"a": 1}'},
    {"type": "function_call", "call_id": "2", "name": "add", "arguments": '{"a": 2}'},
    {"type": "function_call_output", "call_id": "1", "output": "3"},
    {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "4"}]},
]


def read(**given: Any) -> ChatRequest:
    found = read_response({"model": NAME, **given}, UnknownFields(True, print)).request
    assert isinstance(found, ChatRequest)
    return found


def test_items_are_messages() -> None:
    """What the assistant thought, said and called in one turn is one message."""
    found = read(input=ITEMS, instructions="Be brief.", max_output_tokens=7)
    assert [one["role"] for one in found.messages] == ["system", "user", "assistant", "tool", "tool"]
    _, user, assistant, *results = found.messages
    assert (user["content"], assistant["content"], assistant["reasoning_content"]) == ("add", "Yes.", "I add.")
    assert [call["id"] for call in assistant["tool_calls"]] == ["1", "2"]
    assert [(one["tool_call_id"], one["content"]) for one in results] == [("1", "3"), ("2", "4")]
    assert found.max_completion_tokens == 7


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_is_that_of_the_chat(client: OpenAI, stream: bool) -> None:
    chat: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    expected = client.chat.completions.create(model=NAME, messages=chat, max_tokens=6)
    asked: dict[str, Any] = {"instructions": "be brief", "input": "hi", "max_output_tokens": 6}
    if stream:
        events = list(client.responses.create(model=NAME, stream=True, **asked))
        assert events[-1].type == "response.incomplete"
        found: Any = events[-1].response
        texts = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(texts) == found.output_text
    else:
        found = client.responses.create(model=NAME, **asked)
    assert found.output_text == expected.choices[0].message.content
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert expected.usage is not None
    assert found.usage.input_tokens == expected.usage.prompt_tokens


def test_a_format(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"format": {"type": "json_schema", "name": "found", "schema": schema, "strict": True}}
    found = client.responses.create(
        model=NAME, input="hi", text=form, max_output_tokens=60, extra_body={"frequency_penalty": 2.0}
    )
    assert found.output_text.replace(" ", "").replace("\n", "") in ('{"a":1}', '{"a":2}')


def test_calls_in_pieces_are_items() -> None:
    """As the official client gathers the events."""
    made = ResponseEvents({}, Head("x", NAME, 3))
    made.begin()
    for delta in (
        {"reasoning_content": "I "},
        {"reasoning_content": "add."},
        {"content": "Yes."},
        {"tool_calls": [{"index": 0, "id": "c0", "type": "function", "function": {"name": "add", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
        {"tool_calls": [{"index": 1, "id": "c1", "type": "function", "function": {"name": "sub", "arguments": "{}"}}]},
    ):
        made.on_delta(delta)
    made.on_end(Ending("tool_calls", False, 0.0), {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7})
    found = openai.types.responses.Response.model_validate(made.response(), strict=True)
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call", "function_call"]
    calls = [(one.call_id, one.name, one.arguments) for one in found.output if one.type == "function_call"]
    assert calls == [("c0", "add", '{"a": 1}'), ("c1", "sub", "{}")]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"input": [{"type": "item_reference", "id": "1"}]}, "input.0.type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "hi " * 3000}, "input"),
]


@pytest.mark.parametrize(("change", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_done_is_refused_by_name(client: OpenAI, change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        client.responses.create(model=NAME, **({"input": "hi"} | change))
    assert found.value.param == param
