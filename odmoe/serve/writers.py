"""How an API writes what the engine has answered: OpenAI's own, and translations of it into other APIs'."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from odmoe.serve.openai.parts import parts_of
from odmoe.serve.sse import DONE, EVENT_STREAM, PING, encode, encoded_parts, event

if TYPE_CHECKING:
    from odmoe.serve.answers import AnswerEvent
    from odmoe.serve.api_error import ApiError
    from odmoe.serve.openai.parts import Part, Shape


class ResponseWriter(Protocol):
    """Of one request's response."""

    media_type: str
    """Of its stream."""
    ping: bytes
    """What keeps a stream open on which nothing comes. Empty: this API has nothing for it."""

    def begin(self) -> bytes:
        """What a stream begins with."""

    def events(self, got: list[AnswerEvent]) -> bytes:
        """What pieces of answers add to a stream."""

    def end(self, usage: dict[str, Any]) -> bytes:
        """What ends a stream."""

    def error(self, error: ApiError) -> bytes:
        """What ends a stream that fails."""

    def whole(self, got: list[AnswerEvent], usage: dict[str, Any]) -> bytes:
        """The response if no stream was asked for."""


class OpenAIWriter:
    """`/v1/completions`, `/v1/chat/completions`."""

    media_type, ping = EVENT_STREAM, PING

    def __init__(self, shape: Shape, include_usage: bool) -> None:
        self._shape, self._include_usage = shape, include_usage

    def begin(self) -> bytes:
        return b""

    def events(self, got: list[AnswerEvent]) -> bytes:
        return b"".join(event(chunk) for part in parts_of(got) for chunk in self._shape.chunks(part))

    def end(self, usage: dict[str, Any]) -> bytes:
        return (event(self._shape.usage_chunk(usage)) if self._include_usage else b"") + DONE

    def error(self, error: ApiError) -> bytes:
        return event(error.as_object())

    def whole(self, got: list[AnswerEvent], usage: dict[str, Any]) -> bytes:
        """Choice by choice: what is written needs several times the memory until it is."""
        parts = parts_of(got)
        got.clear()
        before, named, after = encode(self._shape.response([], usage)).partition(b'"choices":[')
        body = bytearray(before + named)
        parts.reverse()
        while parts:
            (choice,) = self._shape.response([parts.pop()], usage)["choices"]
            for piece in encoded_parts(choice):
                body += piece
            body += b"," if parts else b""
        return bytes(body + after)


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an answer has ended."""

    reason: str
    """Our `finish_reason`: stop, length, tool_calls."""
    is_stop_text: bool
    """A stop text of the request has ended it."""
    first_at: float
    """When its first piece came, by `time.perf_counter`."""


class Translation(Protocol):
    """Of one answer, from our chat chunks into another API's events."""

    media_type: str
    ping: bytes

    def begin(self) -> bytes:
        """What a stream begins with."""

    def on_delta(self, delta: dict[str, Any]) -> bytes:
        """A chunk's `delta`: `content`, `reasoning_content`, `tool_calls`, each of which may be missing."""

    def on_end(self, ending: Ending, usage: dict[str, Any]) -> bytes:
        """The answer is whole. `usage`: as OpenAI's chat API has it."""

    def on_error(self, error: ApiError) -> bytes:
        """The stream fails."""

    def response(self) -> dict[str, Any]:
        """The whole response, after `on_end`."""


class TranslatedWriter:
    """Another API's. Whole answers pass the same translation as streams."""

    def __init__(self, shape: Shape, translation: Translation) -> None:
        self._shape, self._translation = shape, translation
        self.media_type, self.ping = translation.media_type, translation.ping
        self._reason, self._is_stop_text = "stop", False
        self._first_at: float | None = None

    def begin(self) -> bytes:
        return self._translation.begin()

    def events(self, got: list[AnswerEvent]) -> bytes:
        self._note_first(got)
        return b"".join(self._translate(part, self._shape.chunks(part)) for part in parts_of(got))

    def _note_first(self, got: list[AnswerEvent]) -> None:
        if self._first_at is None and got:
            self._first_at = got[0].at

    def _translate(self, part: Part, chunks: Iterable[dict[str, Any]]) -> bytes:
        found = b""
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            found += self._translation.on_delta(_delta(choice))
            if choice.get("finish_reason") is not None:
                self._reason, self._is_stop_text = choice["finish_reason"], part.finish == "stop_text"
        return found

    def end(self, usage: dict[str, Any]) -> bytes:
        return self._translation.on_end(self._ending(), usage)

    def _ending(self) -> Ending:
        first_at = time.perf_counter() if self._first_at is None else self._first_at
        return Ending(self._reason, self._is_stop_text, first_at)

    def error(self, error: ApiError) -> bytes:
        return self._translation.on_error(error)

    def whole(self, got: list[AnswerEvent], usage: dict[str, Any]) -> bytes:
        self._note_first(got)
        for part in parts_of(got):
            self._translate(part, [self._shape.response([part], usage)])
        self._translation.on_end(self._ending(), usage)
        return encode(self._translation.response())


def _delta(choice: dict[str, Any]) -> dict[str, Any]:
    """What a choice of a chunk or of a response adds."""
    if "delta" in choice:
        return choice["delta"]  # type: ignore[no-any-return]
    if "message" not in choice:
        return {"content": choice["text"]}
    message = choice["message"]
    calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls") or [])]
    return {**message, "tool_calls": calls}
