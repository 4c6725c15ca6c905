"""A chat with the demo model, by the official client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import OpenAI

NAME = "demo-moe"
CHAT: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def answer(client: OpenAI, **asked: Any) -> Any:
    fields: dict[str, Any] = {"messages": CHAT, "max_completion_tokens": 8} | asked
    return client.chat.completions.create(model=NAME, **fields)
