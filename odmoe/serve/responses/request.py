"""Requests of `/v1/responses` as chats: https://platform.openai.com/docs/api-reference/responses/create."""

from __future__ import annotations

from functools import partial
from typing import Any

from odmoe.serve.openai.requests import ChatRequest
from odmoe.serve.request_fields import Body, UnknownFields, objects_in, unsupported
from odmoe.serve.responses.events import ResponseEvents
from odmoe.serve.translated import Translated, system_messages, to_translated, without_none

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "previous_response_id": ("",),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
    "context_management": ([],),
    "moderation": (),
}
"""Fields that are not supported, with the values that ask for nothing. Nothing is stored here: a client sends the whole
conversation each time."""
UNUSED = (
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "service_tier",
    "store",
    "stream_options",
    "max_tool_calls",
    "client_metadata",
)
"""Fields that change no answer here. `max_tool_calls` is about the tools of OpenAI's own hosts."""
INCLUDABLE = ("message.output_text.logprobs",)
"""Values of `include` that ask for something which a response here does not have."""
NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text.format"}
NAMES["reasoning_effort"] = "reasoning.effort"
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
"""Fields that mean the same in a chat. Those that OpenAI's own API lacks are as other servers have them."""
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
CALLS = ("function_call", "function_call_output")


def read_response(given: dict[str, Any], fields: UnknownFields) -> Translated:
    """Raises ApiError."""
    body = Body(given)
    model = body.need("model", str)
    echo = {name: given.get(name) for name in ("instructions", "tools", "temperature", "top_p", "max_output_tokens")}
    echo |= {
        "metadata": body.take("metadata", dict, {}),
        "text": given.get("text"),
        "reasoning": given.get("reasoning"),
    }
    echo |= {"tool_choice": given.get("tool_choice"), "parallel_tool_calls": given.get("parallel_tool_calls")}
    chat: dict[str, Any] = {"model": model, "stream": body.take("stream", bool, False)}
    chat["messages"] = system_messages(body.take("instructions", str, "")) + _messages(body, fields)
    chat["max_completion_tokens"] = body.take_any("max_output_tokens")
    chat["response_format"] = _format(body, fields)
    chat["tools"] = [_tool(place, tool) for place, tool in objects_in(body.take("tools", list, []), "tools")]
    chat["tool_choice"] = _choice(body.take_any("tool_choice"))
    chat["parallel_tool_calls"] = body.take_any("parallel_tool_calls")
    chat["chat_template_kwargs"] = body.take_any("chat_template_kwargs")
    chat["reasoning_effort"] = _effort(body, fields)
    chat |= {name: body.take_any(name) for name in SAMPLING}
    for name in body.take("include", list, []):
        if name in INCLUDABLE:
            raise body.invalid("include", f"has {name}, which is not supported; leave it out")
    if body.take_any("top_logprobs"):
        raise body.invalid("top_logprobs", "is not supported by this route; ask /v1/chat/completions")
    body.refuse(UNSUPPORTED)
    body.skip(*UNUSED)
    body.end(fields)
    return to_translated(ChatRequest, chat, fields, partial(ResponseEvents, echo), model, NAMES)


def _messages(body: Body, fields: UnknownFields) -> list[dict[str, Any]]:
    """A chat's messages. What the assistant thought, said and called in one turn is one of them."""
    given = body.take_any("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise body.invalid("input", "is neither a text nor a list of items; give one of them")
    found: list[dict[str, Any]] = []
    for place, item in objects_in(given, "input"):
        message = _message(Body(item, place), item, fields)
        if message["role"] == "assistant" and found and found[-1]["role"] == "assistant":
            _join(found[-1], message)
        else:
            found.append(message)
    return found


def _message(body: Body, item: dict[str, Any], fields: UnknownFields) -> dict[str, Any]:
    """One item of a request's input."""
    kind = body.take("type", str, "message")
    body.skip("id", "status", "phase")
    if kind == "message":
        role, content = body.need("role", str), body.take_text("content", TEXTS)
        body.end(fields)
        return {"role": role, "content": content}
    if kind == "function_call":
        function = {"name": body.need("name", str), "arguments": body.take("arguments", str, "") or "{}"}
        call = {"id": body.need("call_id", str), "type": "function", "function": function}
        body.end(fields)
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": body.need("call_id", str), "content": body.take_text("output", TEXTS)}
    if kind == "reasoning":
        texts = [one for name in ("content", "summary") if (one := body.take_text(name, TEXTS))]
        return {"role": "assistant", "content": "", "reasoning_content": texts[0] if texts else ""}
    remedy = "; nothing is stored here: send the item itself (store false)" if kind == "item_reference" else ""
    raise body.invalid("type", f"is {kind!r}; allowed: message, reasoning, {', '.join(CALLS)}{remedy}")


def _join(before: dict[str, Any], message: dict[str, Any]) -> None:
    for name in ("content", "reasoning_content"):
        texts = [one[name] for one in (before, message) if one.get(name)]
        if texts:
            before[name] = "\n".join(texts)
    if "tool_calls" in message:
        before.setdefault("tool_calls", []).extend(message["tool_calls"])


def _format(body: Body, fields: UnknownFields) -> dict[str, Any] | None:
    text = Body(body.take("text", dict, {}), "text")
    given = text.take("format", dict, {})
    text.skip("verbosity")
    text.end(fields)
    if not given or given.get("type") != "json_schema":
        return given or None
    schema = {name: value for name, value in given.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}


def _tool(place: str, given: dict[str, Any]) -> dict[str, Any]:
    kind = given.get("type")
    if kind != "function":
        raise unsupported(f"{place}.type", f"is {kind!r}, which is not supported; allowed: function")
    function = {name: given.get(name) for name in ("name", "description", "parameters", "strict")}
    return {"type": "function", "function": without_none(function)}


def _choice(given: Any) -> Any:
    if isinstance(given, dict) and given.get("type") == "function":
        return {"type": "function", "function": {"name": given.get("name")}}
    if isinstance(given, dict):
        raise unsupported("tool_choice", f"has type {given.get('type')!r}, which is not supported; allowed: function")
    return given


def _effort(body: Body, fields: UnknownFields) -> Any:
    reasoning = Body(body.take("reasoning", dict, {}), "reasoning")
    effort = reasoning.take_any("effort")
    reasoning.skip("summary", "generate_summary", "context")
    reasoning.end(fields)
    return effort
