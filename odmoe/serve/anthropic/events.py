"""Our chat chunks as the events of Anthropic's `/v1/messages`: https://docs.claude.com/en/api/messages-streaming."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from odmoe.serve.error_forms import ANTHROPIC, error_object
from odmoe.serve.sse import EVENT_STREAM, named_event

if TYPE_CHECKING:
    from odmoe.serve.api_error import ApiError
    from odmoe.serve.translated import Head
    from odmoe.serve.writers import Ending

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
"""By our `finish_reason`. Another one: `end_turn`."""
BLOCKS: dict[str, dict[str, Any]] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}


class MessageEvents:
    """Blocks of the content come one after the other."""

    media_type = EVENT_STREAM
    ping = named_event({"type": "ping"})

    def __init__(self, stops: list[str], head: Head) -> None:
        """`stops`: the texts that may end the answer."""
        self._stops, self._head = stops, head
        self._content: list[dict[str, Any]] = []
        self._is_open = False
        """The last block grows."""
        self._call_index: int | None = None
        self._arguments = ""
        """Of the call that grows, as JSON."""
        self._message: dict[str, Any] = {
            "id": f"msg_{head.record_id}",
            "type": "message",
            "role": "assistant",
            "model": head.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": head.prompt_tokens, "output_tokens": 0},
        }

    def begin(self) -> bytes:
        return named_event({"type": "message_start", "message": self._message})

    def on_delta(self, delta: dict[str, Any]) -> bytes:
        found = b""
        if delta.get("reasoning_content"):
            found += self._on_text("thinking", delta["reasoning_content"])
        if delta.get("content"):
            found += self._on_text("text", delta["content"])
        for call in delta.get("tool_calls") or ():
            found += self._on_call(call)
        return found

    def _on_text(self, kind: str, text: str) -> bytes:
        found = b""
        if not self._is_open or self._content[-1]["type"] != kind:
            found += self._close() + self._open(dict(BLOCKS[kind]))
        self._content[-1][kind] += text
        return found + self._delta({"type": f"{kind}_delta", kind: text})

    def _on_call(self, call: dict[str, Any]) -> bytes:
        function, found = call.get("function") or {}, b""
        if not self._is_open or self._content[-1]["type"] != "tool_use" or call["index"] != self._call_index:
            found += self._close()
            self._call_index, self._arguments = call["index"], ""
            found += self._open({"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": {}})
        arguments = function.get("arguments")
        if arguments:
            self._arguments += arguments
            found += self._delta({"type": "input_json_delta", "partial_json": arguments})
        return found

    def _open(self, block: dict[str, Any]) -> bytes:
        self._content.append(block)
        self._is_open = True
        return named_event({"type": "content_block_start", "index": len(self._content) - 1, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named_event({"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta})

    def _close(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        block = self._content[-1]
        if block["type"] == "tool_use":
            block["input"] = _object(self._arguments)
        return named_event({"type": "content_block_stop", "index": len(self._content) - 1})

    def on_end(self, ending: Ending, usage: dict[str, Any]) -> bytes:
        found = self._close()
        reason = STOP_REASONS.get(ending.reason, "stop_sequence" if ending.is_stop_text else "end_turn")
        sequence = self._stops[0] if ending.is_stop_text and len(self._stops) == 1 else None
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        counts = {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }
        ended = {"stop_reason": reason, "stop_sequence": sequence}
        self._message |= {"content": self._content, "usage": counts, **ended}
        found += named_event({"type": "message_delta", "delta": ended, "usage": counts})
        return found + named_event({"type": "message_stop"})

    def on_error(self, error: ApiError) -> bytes:
        return named_event(error_object(error, ANTHROPIC, self._head.record_id))

    def response(self) -> dict[str, Any]:
        return self._message


def _object(arguments: str) -> dict[str, Any]:
    """What a call's arguments are, which a cut answer may have in part."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
