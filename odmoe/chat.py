"""Chats in the model's chat template."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scheduler.errors import ConfigError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal", "reasoning_content")
"""Of a message, as templates know them. Others are ignored but for those that say something else."""
_REFUSED = ("audio",)
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts, and the field of each that has its text."""


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

    Control tokens within messages and tools are marked, so that `odmoe.text.encode` encodes them as text;
    `odmoe.text.without_marks` takes the marks out.

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
    read = _as_template_has_it(str(tokenizer.chat_template), read)
    how = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    marked, offered, more = _marked(tokenizer, read, list(tools), dict(variables or {}))
    try:
        return _render(tokenizer, marked, offered, how | more)
    except Exception as error:  # Jinja's own, or one that the template raises
        with_texts = _arguments_as_text(marked)
        if with_texts is not None:
            try:
                return _render(tokenizer, with_texts, offered, how | more)
            except Exception:  # noqa: BLE001 - the first one says more
                pass
        reason = str(error) or type(error).__name__
        raise ConfigError(f"the model's chat template refuses this chat: {reason}") from error


def _render(tokenizer: Any, messages: list[dict[str, Any]], tools: list[Any], how: dict[str, Any]) -> str:
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, tools=tools or None, **how)
    return text


def _marked(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list[Any], variables: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[Any], dict[str, Any]]:
    """With marks around control tokens: all special tokens, and other added ones that the template writes."""
    from transformers.utils.chat_template_utils import mark_control_tokens

    template = str(tokenizer.chat_template)
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    control = {one.content for one in added if one.special or (one.content.strip() and one.content in template)}
    pattern = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "(?!)")
    read = [{**mark_control_tokens(message, pattern), "role": message["role"]} for message in messages]
    return read, mark_control_tokens(tools, pattern), mark_control_tokens(variables, pattern)


def _arguments_as_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """For templates that put the arguments of calls together with texts (DeepSeek-V3). None: there are no calls."""
    if not any(message.get("tool_calls") for message in messages):
        return None
    found = []
    for message in messages:
        calls = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                },
            }
            for call in message.get("tool_calls", ())
        ]
        found.append({**message, "tool_calls": calls} if calls else message)
    return found


def _as_template_has_it(template: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What single families demand of messages that were answers."""
    if "<|channel|>" in template:  # gpt-oss: reasoning has a name of its own, and only one text may stand before a call
        for message in messages:
            if "reasoning_content" in message and not (message["content"] and message.get("tool_calls")):
                message["thinking"] = message["reasoning_content"]
    if "[TOOL_CALLS]" in template:  # Mistral: ids have nine characters
        for message in messages:
            for place in (message, *message.get("tool_calls", ())):
                for name in ("id", "tool_call_id"):
                    if isinstance(place.get(name), str):
                        place[name] = _nine_characters(place[name])
    return messages


def _nine_characters(call_id: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9]{9}", call_id):
        return call_id
    return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:9]


def _message(place: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """As templates know it: text for content, tool calls' arguments as objects."""
    for name in _REFUSED:
        if given.get(name) is not None:
            raise ConfigError(f"{place}.{name} is not supported; leave it out")
    role = given.get("role")
    if role not in ROLES:
        raise ConfigError(f"{place}.role is {role!r}; allowed: {', '.join(ROLES)}")
    message = {name: given[name] for name in FIELDS if given.get(name) is not None}
    message["role"] = {"developer": "system", "function": "tool"}.get(role, role)
    message["content"] = _content(f"{place}.content", given.get("content"), role in ("assistant", "tool", "function"))
    reasoning = given.get("reasoning_content", given.get("reasoning"))
    message.pop("reasoning_content", None)
    if isinstance(reasoning, str) and reasoning:
        message["reasoning_content"] = reasoning
    calls = given.get("tool_calls")
    if not calls and isinstance(given.get("function_call"), Mapping):
        calls = [{"id": "call_0", "type": "function", "function": given["function_call"]}]
    message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = _calls(f"{place}.tool_calls", calls)
    return message


def _content(place: str, content: Any, may_be_missing: bool) -> str:
    if may_be_missing and not content:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ConfigError(f"{place} is not a text, nor a list of parts of type text")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else part
        text = part.get(_TEXTS[kind]) if isinstance(part, dict) and kind in _TEXTS else None
        if not isinstance(text, str):
            raise ConfigError(f"{place}.{number} has type {kind!r}; allowed: text")
        texts.append(text)
    return "\n".join(texts)


def _calls(place: str, calls: Any) -> list[dict[str, Any]]:
    try:
        return [{**call, "function": _function(call["function"])} for call in calls]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ConfigError(f"{place} has a call that is not a function with a name") from error


def _function(given: Mapping[str, Any]) -> dict[str, Any]:
    name = given["name"]
    if not isinstance(name, str):
        raise ValueError(name)
    return {"name": name, "arguments": arguments_object(given.get("arguments") or {})}


def arguments_object(given: Any) -> dict[str, Any]:
    """Arguments of a call as an object, which templates need. Of those that were cut, what there is; what is no object
    is wrapped in one: a chat goes on after a call that the model got wrong."""
    if isinstance(given, dict):
        return given
    if not isinstance(given, str):
        return {"arguments": given}
    from pydantic_core import from_json

    for how in ("off", "trailing-strings"):
        try:
            found = from_json(given, allow_partial=how)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return {"arguments": given}
