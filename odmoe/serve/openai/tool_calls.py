"""Tool calls in an answer, read by Transformers' own parser of responses."""

from __future__ import annotations

import json
import secrets
from typing import Any, NamedTuple

from odmoe.serve.api_error import ApiError

HERMES: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"\Z",
    "fields": {
        "content": {"repeats": True, "join": ""},
        "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"},
    },
}
"""How models answer whose chat template writes calls as `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, which
few of them declare: Hermes, Qwen 2.5 and 3."""


class Message(NamedTuple):
    """A parsed answer."""

    content: str | None
    calls: list[dict[str, Any]]
    """As OpenAI's API has them."""


def check_parser(tokenizer: Any) -> None:
    """Raises ApiError where it is not known how the model writes tool calls."""
    _template(tokenizer)


def _template(tokenizer: Any) -> dict[str, Any]:
    own: dict[str, Any] | None = getattr(tokenizer, "response_template", None)
    if own is not None:
        return own
    if "<tool_call>" in str(tokenizer.chat_template):
        return HERMES
    raise ApiError(
        400,
        "it is not known how this model writes tool calls: its tokenizer has no response_template; leave tools out",
        param="tools",
        code="unsupported_parameter",
    )


def parse_answer(tokenizer: Any, prompt: str, answer: str, tools: list[dict[str, Any]]) -> Message | None:
    """The content and the calls of an answer's text, which has its special tokens. None where it has no calls, or not
    as the template says: then its text is all there is."""
    try:
        found = tokenizer.parse_response(answer, _template(tokenizer), prefix=prompt, tools=tools)
        calls = [_call(call.get("function", call)) for call in found.get("tool_calls") or []]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return Message((found.get("content") or "").strip() or None, calls) if calls else None


def _call(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": function["name"], "arguments": text},
    }
