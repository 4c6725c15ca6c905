"""Chats in the model's chat template."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Any

from odmoe.api.chat import templated
from odmoe.serve.api_error import ApiError
from scheduler.errors import ConfigError

if TYPE_CHECKING:
    from odmoe.serve.openai.requests import ChatRequest

ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal", "reasoning_content")
"""Of a message."""


def chat_text(tokenizer: Any, request: ChatRequest) -> str:
    """The chat up to where the answer begins. Raises ApiError where the model has no template, or one that does not
    know what is asked."""
    if not getattr(tokenizer, "chat_template", None):
        raise ApiError(
            400,
            "the model has no chat template; use /v1/completions, or serve an instruct model",
            param="messages",
            code="no_chat_template",
        )
    messages = [_message(number, message) for number, message in enumerate(request.messages)]
    _check_variables(tokenizer, request.chat_template_kwargs)
    text = _applied(tokenizer, messages, None, request.chat_template_kwargs)
    tools = offered(request)
    if not tools:
        return text
    with_tools = _applied(tokenizer, messages, tools, request.chat_template_kwargs)
    if with_tools == text:
        raise ApiError(
            400, "the model's chat template knows no tools; leave them out", param="tools", code="unsupported_parameter"
        )
    return with_tools


def offered(request: ChatRequest) -> list[dict[str, Any]]:
    """The tools that the model may call. Raises ApiError for one that is not a function."""
    for number, tool in enumerate(request.tools):
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise ApiError(
                400,
                f"tools.{number} is not a function with a name; others are not supported",
                param=f"tools.{number}",
                code="unsupported_parameter",
            )
    return request.tools if request.tool_choice == "auto" else []


def _check_variables(tokenizer: Any, variables: dict[str, Any]) -> None:
    """Raises ApiError for what is no variable: a template of the client's own would run here."""
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in variables:
        if name in parameters:
            raise ApiError(
                400,
                f"chat_template_kwargs.{name} is no variable of the chat template; leave it out",
                param="chat_template_kwargs",
                code="unsupported_parameter",
            )


def _applied(tokenizer: Any, messages: list[Any], tools: list[Any] | None, variables: dict[str, Any]) -> str:
    try:
        return templated(tokenizer, messages, {"tools": tools, **variables})
    except ConfigError as error:
        raise ApiError(400, str(error), param="messages", code="invalid_value") from error


def _message(number: int, given: dict[str, Any]) -> dict[str, Any]:
    """As templates know it: text for content, tool calls' arguments as objects."""
    place = f"messages.{number}"
    for name in given:
        if name not in FIELDS and given[name] is not None:
            raise _wrong(f"{place}.{name}", f"is not supported; allowed: {', '.join(FIELDS)}")
    role = given.get("role")
    if role not in ROLES:
        raise _wrong(f"{place}.role", f"is {role!r}; allowed: {', '.join(ROLES)}")
    message = {name: value for name, value in given.items() if value is not None}
    message["role"] = "system" if role == "developer" else role
    message["content"] = _text(f"{place}.content", given.get("content"), bool(given.get("tool_calls")))
    if "tool_calls" in message:
        message["tool_calls"] = _calls(f"{place}.tool_calls", message["tool_calls"])
    return message


def _text(place: str, content: Any, may_be_missing: bool) -> str:
    if content is None and may_be_missing:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise _wrong(place, "is not a text, nor a list of parts of type text")
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise _wrong(f"{place}.{number}", f"has type {kind!r}; allowed: text")
    return "\n".join(part["text"] for part in content)


def _calls(place: str, calls: Any) -> list[dict[str, Any]]:
    try:
        return [{**call, "function": _function(call["function"])} for call in calls]
    except (TypeError, KeyError, ValueError) as error:
        raise _wrong(place, "has a call that is not a function with a name and arguments of JSON") from error


def _function(given: dict[str, Any]) -> dict[str, Any]:
    return {"name": given["name"], "arguments": json.loads(given.get("arguments") or "{}")}


def _wrong(place: str, text: str) -> ApiError:
    return ApiError(400, f"{place} {text}", param=place, code="invalid_value")
