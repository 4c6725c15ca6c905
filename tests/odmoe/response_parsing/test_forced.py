"""Calls that a request demands: what a schema's guide lets through is read as a call."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from odmoe.response_parsing.forced import forced_call
from odmoe.response_parsing.forms import find_form
from odmoe.response_parsing.parsers import make_parser, merge_deltas
from support.chats.answers import plain, read, tokenizer_of
from support.chats.families import FAMILIES

TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "required": ["root"],
    "$defs": {
        "node": {"type": "object", "properties": {"left": {"$ref": "#/$defs/node"}, "value": {"type": "integer"}}}
    },
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "grow", "parameters": TREE}},
    {"type": "function", "function": {"name": "now"}},
]
ARGUMENTS = {"root": {"left": {"value": 5}}}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_guided_answer_is_a_call(family: str, count: int) -> None:
    form = find_form(tokenizer_of(FAMILIES[family].template))
    forced = forced_call(form, "<think>\n", TOOLS[:count])
    answer: Any = ARGUMENTS if forced.name is not None else {"name": "grow", "arguments": ARGUMENTS}
    jsonschema.validate(answer, json.loads(forced.schema))
    for piecewise in (False, True):
        parser = make_parser(form, "", TOOLS, piecewise=piecewise, forced=forced)
        deltas = [delta for char in json.dumps(answer) for delta in parser.push(char)] + parser.finish(False)
        assert plain(merge_deltas(deltas)) == {"tool_calls": [("grow", ARGUMENTS)]}


@pytest.mark.parametrize("wrong", [{"root": 5}, {"root": {"left": {"value": "x"}}}, {}])
def test_the_schema_holds_within_several(wrong: Any) -> None:
    """References of one tool's schema stay its own."""
    form = find_form(tokenizer_of(FAMILIES["Qwen3"].template))
    schema = json.loads(forced_call(form, "", TOOLS).schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"name": "grow", "arguments": wrong}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"name": "now", "arguments": ARGUMENTS}, schema)
    jsonschema.validate({"name": "now", "arguments": {}}, schema)


@pytest.mark.parametrize("family", ["Qwen3", "DeepSeek-R1", "DeepSeek-V3.1", "Kimi-K2", "gpt-oss", "MiniMax-M1"])
def test_the_opening_is_the_familys_own(family: str) -> None:
    """With what closes a call, it reads as one that the model has begun itself."""
    form = find_form(tokenizer_of(FAMILIES[family].template))
    forced = forced_call(form, "", TOOLS[:1])
    rest = json.dumps(ARGUMENTS if forced.name is not None else {"name": "grow", "arguments": ARGUMENTS})
    found = read(family, "", [forced.opening + rest], False, tools=TOOLS)
    assert plain(found) == {"tool_calls": [("grow", ARGUMENTS)]}


def test_reasoning_that_the_prompt_has_begun_is_ended() -> None:
    form = find_form(tokenizer_of(FAMILIES["Qwen3"].template))
    assert forced_call(form, "<|im_start|>assistant\n<think>\n", TOOLS).opening.startswith("\n</think>")
    assert not forced_call(form, "<|im_start|>assistant\n", TOOLS).opening.startswith("\n</think>")
