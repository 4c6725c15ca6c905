"""Our chunks as the lines of ollama's streams: a JSON object each."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from odmoe.chat import arguments_object
from odmoe.serve.error_forms import OLLAMA, error_object
from odmoe.serve.sse import encode

if TYPE_CHECKING:
    from odmoe.serve.api_error import ApiError
    from odmoe.serve.translated import Head
    from odmoe.serve.writers import Ending


class Lines:
    """Of `/api/chat` or `/api/generate`. A tool call goes out when it is whole: ollama's have arguments as objects."""

    media_type = "application/x-ndjson"
    ping = b""

    def __init__(self, head: Head, is_chat: bool) -> None:
        self._head, self._is_chat = head, is_chat
        self._began = time.perf_counter()
        self._content, self._thinking = "", ""
        self._calls: list[dict[str, Any]] = []
        self._last: dict[str, Any] = {}

    def begin(self) -> bytes:
        return b""

    def on_delta(self, delta: dict[str, Any]) -> bytes:
        for call in delta.get("tool_calls") or ():
            self._on_call(call)
        content, thinking = delta.get("content") or "", delta.get("reasoning_content") or ""
        if not content and not thinking:
            return b""
        self._content += content
        self._thinking += thinking
        return _line(self._object(content, thinking, []) | {"done": False})

    def _on_call(self, call: dict[str, Any]) -> None:
        """Calls grow piece by piece."""
        while len(self._calls) <= call["index"]:
            self._calls.append({"name": "", "arguments": ""})
        function = call.get("function") or {}
        for name in ("name", "arguments"):
            self._calls[call["index"]][name] += function.get(name) or ""

    def _object(self, content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        more |= {"tool_calls": calls} if calls else {}
        return _object_of(self._head.model, self._is_chat, content, more)

    def on_end(self, ending: Ending, usage: dict[str, Any]) -> bytes:
        calls = [
            {"function": {"name": one["name"], "arguments": arguments_object(one["arguments"] or {})}}
            for one in self._calls
        ]
        now = time.perf_counter()
        first = max(ending.first_at, self._began)
        figures = {
            "done": True,
            "done_reason": "length" if ending.reason == "length" else "stop",
            "total_duration": _nanoseconds(now - self._began),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(first - self._began),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _nanoseconds(now - first),
        }
        self._last = self._object(self._content, self._thinking, calls) | figures
        with_calls = _line(self._object("", "", calls) | {"done": False}) if calls else b""
        return with_calls + _line(self._object("", "", []) | figures)

    def on_error(self, error: ApiError) -> bytes:
        return _line(error_object(error, OLLAMA))

    def response(self) -> dict[str, Any]:
        return self._last


@dataclass(frozen=True, slots=True)
class Preload:
    """A request without a prompt, by which ollama's clients have a model loaded, or with `keep_alive` 0 unloaded. Here
    it is loaded, and stays so."""

    model: str
    """As the client has named it."""
    is_chat: bool


def preloaded(asked: Preload) -> dict[str, Any]:
    """The answer to a request without a prompt: one object, whether a stream was asked for or not."""
    return _object_of(asked.model, asked.is_chat, "", {}) | {"done": True, "done_reason": "load"}


def _object_of(model: str, is_chat: bool, content: str, more: dict[str, Any]) -> dict[str, Any]:
    head = {"model": model, "created_at": _now()}
    if not is_chat:
        return head | {"response": content} | more
    return head | {"message": {"role": "assistant", "content": content} | more}


def _line(value: dict[str, Any]) -> bytes:
    return encode(value) + b"\n"


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
