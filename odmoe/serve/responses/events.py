"""Our chat chunks as the events of `/v1/responses`: https://platform.openai.com/docs/api-reference/responses-streaming."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from odmoe.serve.sse import EVENT_STREAM, PING, named_event

if TYPE_CHECKING:
    from odmoe.serve.api_error import ApiError
    from odmoe.serve.translated import Head
    from odmoe.serve.writers import Ending


PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
"""Of the ids of items."""
HEADS: dict[str, dict[str, Any]] = {"message": {"role": "assistant"}, "reasoning": {"summary": []}}


class ResponseEvents:
    """Items of the output come one after the other: what the model thought, what it said, what it calls."""

    media_type, ping = EVENT_STREAM, PING

    def __init__(self, echo: dict[str, Any], head: Head) -> None:
        """`echo`: fields of the request that a response repeats."""
        self._head = head
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        """The last item of the output, while it grows."""
        self._call_index: int | None = None
        """Of the call that grows."""
        self._response = {
            "id": f"resp_{head.record_id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": head.model,
            "output": [],
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **echo,
            "tools": echo.get("tools") or [],
            "tool_choice": echo.get("tool_choice") or "auto",
            "parallel_tool_calls": echo.get("parallel_tool_calls") is not False,
            "text": echo.get("text") or {"format": {"type": "text"}},
        }

    def begin(self) -> bytes:
        return self._event("response.created", response=self._response) + self._event(
            "response.in_progress", response=self._response
        )

    def on_delta(self, delta: dict[str, Any]) -> bytes:
        found = b""
        if delta.get("reasoning_content"):
            found += self._on_text("reasoning", "reasoning_text", delta["reasoning_content"])
        if delta.get("content"):
            found += self._on_text("message", "output_text", delta["content"])
        for call in delta.get("tool_calls") or ():
            found += self._on_call(call)
        return found

    def _on_text(self, kind: str, part_kind: str, text: str) -> bytes:
        found, item = b"", self._open
        if item is None or item["type"] != kind:
            found += self._close()
            item = self._add({"type": kind, "content": [], **HEADS[kind]})
            found += self._added(item)
            part = _text_part(part_kind)
            item["content"].append(part)
            found += self._event("response.content_part.added", **self._place(item), content_index=0, part=part)
        item["content"][0]["text"] += text
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return found + self._event(
            f"response.{part_kind}.delta", **self._place(item), content_index=0, delta=text, **more
        )

    def _on_call(self, call: dict[str, Any]) -> bytes:
        function, found, item = call.get("function") or {}, b"", self._open
        if item is None or item["type"] != "function_call" or call["index"] != self._call_index:
            found += self._close()
            self._call_index = call["index"]
            named = {"call_id": call.get("id"), "name": function.get("name")}
            item = self._add({"type": "function_call", **named, "arguments": ""})
            found += self._added(item)
        arguments = function.get("arguments")
        if arguments:
            item["arguments"] += arguments
            found += self._event("response.function_call_arguments.delta", **self._place(item), delta=arguments)
        return found

    def _add(self, item: dict[str, Any]) -> dict[str, Any]:
        """It is the open one from now on."""
        number = len(self._output)
        item |= {"id": f"{PREFIXES[item['type']]}_{self._head.record_id}_{number}", "status": "in_progress"}
        self._output.append(item)
        self._open = item
        return item

    def _added(self, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self._output) - 1}

    def _close(self, status: str = "completed") -> bytes:
        """The open item is whole."""
        item, self._open = self._open, None
        if item is None:
            return b""
        item["status"] = status
        place, found = self._place(item), b""
        if item["type"] == "function_call":
            more = {"name": item["name"], "arguments": item["arguments"]}
            found += self._event("response.function_call_arguments.done", **place, **more)
        else:
            part = item["content"][0]
            logprobs: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            done = f"response.{part['type']}.done"
            found += self._event(done, **place, content_index=0, text=part["text"], **logprobs)
            found += self._event("response.content_part.done", **place, content_index=0, part=part)
        return found + self._event("response.output_item.done", output_index=place["output_index"], item=item)

    def on_end(self, ending: Ending, usage: dict[str, Any]) -> bytes:
        is_cut = ending.reason == "length"
        status = "incomplete" if is_cut else "completed"
        found = self._close(status)
        details = {"reason": "max_output_tokens"} if is_cut else None
        self._response |= {
            "status": status,
            "incomplete_details": details,
            "output": self._output,
            "usage": _usage(usage),
            "completed_at": int(time.time()),
        }
        return found + self._event(f"response.{status}", response=self._response)

    def on_error(self, error: ApiError) -> bytes:
        told = {"code": error.code or error.kind, "message": error.message}
        self._response |= {"status": "failed", "error": told, "output": self._output}
        return self._event("error", **told, param=error.param) + self._event("response.failed", response=self._response)

    def response(self) -> dict[str, Any]:
        return self._response

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event({"type": kind, "sequence_number": number, **fields})


def _text_part(kind: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return {"type": kind, "text": "", **more}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """From that of a chat."""
    read, written = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": read.get("cached_tokens") or 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": written.get("reasoning_tokens") or 0},
        "total_tokens": usage["total_tokens"],
    }
