"""Chats in the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scheduler.errors import ConfigError

ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal", "reasoning_content")
"""Of a message."""


def chat_text(
    tokenizer: Any,
    messages: Iterable[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """The chat up to where the answer begins. `add_generation_prompt`: that is a new message of the assistant.
    `continue_final_message`: it is the end of the last message's content, in place of that.

    `messages`, `tools`: as OpenAI's API has them. `variables`: more of the template's. Raises ConfigError where the
    model has no chat template, for messages that are none, and where the template refuses the chat.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "the model has no chat template; have it continue a prompt (odmoe generate without --chat, "
            "Model.generate, /v1/completions), or use an instruct model"
        )
    if continue_final_message and add_generation_prompt:
        raise ConfigError(
            "continue_final_message and add_generation_prompt are both true; an answer either goes on with the last "
            "message or begins a new one: give add_generation_prompt false with continue_final_message"
        )
    read = [_message(f"messages.{number}", message) for number, message in enumerate(messages)]
    try:
        text: str = tokenizer.apply_chat_template(
            read,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=list(tools) or None,
            **(variables or {}),
        )
    except Exception as error:  # Jinja's own, or one that the template raises
        reason = str(error) or type(error).__name__
        raise ConfigError(f"the model's chat template refuses this chat: {reason}") from error
    return text


def _message(place: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """As templates know it: text for content, tool calls' arguments as objects."""
    for name in given:
        if name not in FIELDS and given[name] is not None:
            raise ConfigError(f"{place}.{name} is not supported; allowed: {', '.join(FIELDS)}")
    role = given.get("role")
    if role not in ROLES:
        raise ConfigError(f"{place}.role is {role!r}; allowed: {', '.join(ROLES)}")
    message = {name: value for name, value in given.items() if value is not None}
    message["role"] = "system" if role == "developer" else role
    message["content"] = _content(f"{place}.content", given.get("content"), bool(given.get("tool_calls")))
    if "tool_calls" in message:
        message["tool_calls"] = _calls(f"{place}.tool_calls", message["tool_calls"])
    return message


def _content(place: str, content: Any, may_be_missing: bool) -> str:
    if content is None and may_be_missing:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ConfigError(f"{place} is not a text, nor a list of parts of type text")
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ConfigError(f"{place}.{number} has type {kind!r}; allowed: text")
    return "\n".join(part["text"] for part in content)


def _calls(place: str, calls: Any) -> list[dict[str, Any]]:
    try:
        return [{**call, "function": _function(call["function"])} for call in calls]
    except (TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{place} has a call that is not a function with a name and arguments of JSON") from error


def _function(given: Mapping[str, Any]) -> dict[str, Any]:
    arguments = given.get("arguments") or "{}"
    return {"name": given["name"], "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}
