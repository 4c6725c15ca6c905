"""Requests of Anthropic's `/v1/messages` as chats: https://docs.claude.com/en/api/messages."""

from __future__ import annotations

import json
from typing import Any

from odmoe.serve.anthropic.events import MessageEvents
from odmoe.serve.openai.requests import ChatRequest
from odmoe.serve.request_fields import Body, UnknownFields, objects_in, unsupported
from odmoe.serve.translated import Translated, system_messages, to_translated, without_none

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "context_management": ({}, {"edits": []}),
}
"""Fields that are not supported, with the values that ask for nothing."""
UNUSED = ("metadata", "service_tier", "inference_geo", "cache_control", "speed")
"""Fields that change no answer here."""
NAMES = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences", "response_format": "output_config.format"}
NAMES["reasoning_effort"] = "output_config.effort"
THINKS = {"enable_thinking": True, "thinking": True}
"""Variables of chat templates of models that may think or not."""
ROLES = ("user", "assistant", "system")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""Types of `tool_choice` -> a chat's."""
OWN_TOOLS = (None, "custom")
"""Types of tools that a client runs itself and describes."""


def read_messages(given: dict[str, Any], fields: UnknownFields) -> Translated:
    """Raises ApiError."""
    return _read(given, fields, counts=False)


def read_counted(given: dict[str, Any], fields: UnknownFields) -> Translated:
    """Of `/v1/messages/count_tokens`, which has no answer. Raises ApiError."""
    return _read(given, fields, counts=True)


def _read(given: dict[str, Any], fields: UnknownFields, counts: bool) -> Translated:
    body = Body(given)
    model = body.need("model", str)
    chat: dict[str, Any] = {"model": model, "stream": body.take("stream", bool, False)}
    chat["max_completion_tokens"] = body.take_any("max_tokens") if counts else body.need("max_tokens", int)
    chat["messages"] = system_messages(body.take_text("system"))
    for place, message in objects_in(body.need("messages", list), "messages"):
        chat["messages"] += _messages(Body(message, place), fields)
    chat["tools"] = [
        _tool(Body(one, place), fields) for place, one in objects_in(body.take("tools", list, []), "tools")
    ]
    chat |= _tool_choice(Body(body.take("tool_choice", dict, {}), "tool_choice"), fields)
    chat |= {name: body.take_any(name) for name in ("temperature", "top_p", "top_k", "min_p", "seed")}
    stops = body.take("stop_sequences", list, [])
    chat["stop"] = stops or None
    chat |= _output(body, fields)
    body.refuse(UNSUPPORTED)
    body.skip(*UNUSED)
    body.end(fields)
    return to_translated(ChatRequest, chat, fields, lambda head: MessageEvents(stops, head), model, NAMES)


def _messages(body: Body, fields: UnknownFields) -> list[dict[str, Any]]:
    """Results of tools are messages of their own in a chat, before what else the user says."""
    role = body.need("role", str)
    if role not in ROLES:
        raise body.invalid("role", f"is {role!r}; allowed: {', '.join(ROLES)}")
    content = body.take_any("content")
    body.end(fields)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise body.invalid("content", "is neither a text nor a list of blocks")
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    message: dict[str, Any] = {"role": role}
    for place, given in objects_in(content, body.name_of("content")):
        block = Body(given, place)
        kind = block.need("type", str)
        if kind == "text":
            texts.append(block.need("text", str))
        elif kind == "tool_use":
            message.setdefault("tool_calls", []).append(_call(block))
        elif kind == "tool_result":
            text = block.take_text("content")
            results.append({"role": "tool", "tool_call_id": block.need("tool_use_id", str), "content": text})
        elif kind == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + block.take("thinking", str, "")
        elif kind != "redacted_thinking":
            raise unsupported(place, f"has type {kind!r}; allowed: text, tool_use, tool_result, thinking")
    if texts or len(message) > 1 or not results:
        message["content"] = "\n".join(texts)
        results.append(message)
    return results


def _call(block: Body) -> dict[str, Any]:
    arguments = json.dumps(block.take("input", dict, {}), ensure_ascii=False)
    function = {"name": block.need("name", str), "arguments": arguments}
    return {"id": block.need("id", str), "type": "function", "function": function}


def _tool(body: Body, fields: UnknownFields) -> dict[str, Any]:
    kind = body.take_any("type")
    if kind not in OWN_TOOLS:
        raise body.unsupported("type", f"is {kind!r}, which is not supported; allowed: custom")
    function = {
        "name": body.need("name", str),
        "description": body.take_any("description"),
        "parameters": body.take("input_schema", dict, {}),
        "strict": body.take_any("strict"),
    }
    body.skip("cache_control", "eager_input_streaming", "input_examples", "defer_loading", "allowed_callers")
    body.end(fields)
    return {"type": "function", "function": without_none(function)}


def _tool_choice(body: Body, fields: UnknownFields) -> dict[str, Any]:
    kind, name = body.take("type", str, ""), body.take("name", str, "")
    found: dict[str, Any] = {}
    if body.take("disable_parallel_tool_use", bool, False):
        found["parallel_tool_calls"] = False
    body.end(fields)
    if kind == "tool":
        return found | {"tool_choice": {"type": "function", "function": {"name": name}}}
    if kind and kind not in CHOICES:
        raise body.invalid("type", f"is {kind!r}; allowed: {', '.join(CHOICES)}, tool")
    return found | ({"tool_choice": CHOICES[kind]} if kind else {})


def _output(body: Body, fields: UnknownFields) -> dict[str, Any]:
    """How to think, and the form of the answer."""
    found: dict[str, Any] = {}
    thinking = body.take("thinking", dict, {}).get("type")
    output = Body(body.take("output_config", dict, {}), "output_config")
    found["reasoning_effort"] = output.take_any("effort")
    if thinking == "disabled":
        found["reasoning_effort"] = "none"
    elif thinking == "enabled":
        found["chat_template_kwargs"] = THINKS
    form = output.take("format", dict, body.take("output_format", dict, {}))
    output.end(fields)
    if form:
        schema = {name: value for name, value in form.items() if name != "type"}
        found["response_format"] = {"type": form.get("type"), "json_schema": {"name": "answer", **schema}}
    return found
