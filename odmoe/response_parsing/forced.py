"""Calls that a request demands: the prompt begins them, and a JSON schema guides the rest."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from odmoe.response_parsing.forms import Form

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""Of a function that is given without parameters."""


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """How a call is forced."""

    opening: str
    """The prompt's end, with special tokens."""
    schema: str
    """Of the answer, as JSON."""
    name: str | None
    """The tool whose arguments the answer is. None: the answer is `{"name": ..., "arguments": {...}}`."""


def forced_call(form: Form, prompt: str, tools: list[dict[str, Any]]) -> ForcedCall:
    """A call of one of the tools. If the family writes no JSON, or its header would name the tool among several, the
    call is JSON with name and arguments in place of the family's own form.

    `prompt`: the chat's text. Reasoning that it begins is ended at once.
    """
    functions = [tool["function"] for tool in tools]
    opening = ""
    if form.think is not None and prompt.rstrip().endswith(form.think[0]):
        opening = f"\n{form.think[1]}\n\n"
    header = "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>" if form.is_harmony else None
    if form.calls is not None:
        header = form.calls.header
    if header is not None and len(functions) == 1:
        name = functions[0]["name"]
        return ForcedCall(opening + header.format(name=name), json.dumps(_parameters(functions[0])), name)
    if form.is_harmony:
        opening += "<|channel|>commentary <|constrain|>json<|message|>"
    elif form.calls is not None and form.calls.is_json:
        opening += f"{form.calls.open}\n"
    return ForcedCall(opening, json.dumps(_schema(functions)), None)


def _schema(functions: list[dict[str, Any]]) -> dict[str, Any]:
    """Of any of the calls."""
    definitions, calls = {}, []
    for number, function in enumerate(functions):
        place = f"#/$defs/{number}"
        definitions[str(number)] = _moved(_parameters(function), place)
        properties = {"name": {"const": function["name"]}, "arguments": {"$ref": place}}
        call = {"type": "object", "properties": properties, "required": ["name", "arguments"]}
        calls.append(call | {"additionalProperties": False})
    return {"$defs": definitions, "anyOf": calls}


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    """Arguments are an object, whether the schema says so or not."""
    given = function.get("parameters")
    return {"type": "object", **given} if given else _NO_PARAMETERS


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references are to its new place within another one."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, place) for name, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved
