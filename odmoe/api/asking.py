"""What can be asked of a model, whether its nodes run in this process or a server answers for it."""

from __future__ import annotations

import json
import operator
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from odmoe.api.async_stream import AsyncStream
from odmoe.api.completion import Completion, Stream
from odmoe.api.names import check_names
from odmoe.api.options import Options, checked
from scheduler.closing import Closing
from scheduler.errors import ClusterError, ConfigError, PromptError

Prompt = str | Sequence[int]
"""Text, or token ids."""
Message = Mapping[str, Any]
"""`{"role": "user", "content": "..."}`, as the model's chat template takes it."""


@dataclass(frozen=True, slots=True)
class Query:
    """One prompt, or a chat in place of it, and how to answer."""

    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    options: Options


class AnyModel(Closing):
    """A model, loaded or served: it answers prompts and chats. Several answers may be open at once, in a thread or a
    task each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._closed = False

    @property
    @abstractmethod
    def _why_closed(self) -> str:
        """What is said to whoever asks after `close`."""

    @abstractmethod
    def _begin(self, query: Query) -> Stream:
        """The answer's stream. Nothing is computed before its first chunk is asked for. Raises ConfigError,
        PromptError."""

    @abstractmethod
    def _end(self) -> None:
        """Free what was started or opened for this model. Called once."""

    def close(self) -> None:
        """Give up the open answers, and free what was started or opened for this model. Any number of calls."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            given_up = list(self._open)
        for stream in given_up:
            stream.cancel()
        self._end()

    def _stream(self, query: Query) -> Stream:
        """Raises ClusterError once the model is closed."""
        if not self._closed:
            stream = self._begin(query)
            with self._lock:
                if not self._closed:
                    self._open.add(stream)
                    return stream
        raise ClusterError(self._why_closed)

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole answer to a prompt. Raises PromptError, ConfigError, RequestError, ClusterError."""
        return self._stream(_prompted(prompt, options)).read()

    def chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Completion:
        """The whole answer to a chat, in the model's chat template. Raises what `generate` raises."""
        return self._stream(_chatted(messages, options)).read()

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """The answer to a prompt, in chunks as they come. Iterating raises what `generate` raises."""
        return self._stream(_prompted(prompt, options))

    def stream_chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Stream:
        """The answer to a chat, in chunks as they come."""
        return self._stream(_chatted(messages, options))

    async def agenerate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """As `generate`. Where the task is cancelled, the answer is given up at once."""
        return await self._astream(_prompted(prompt, options)).read()

    async def achat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Completion:
        """As `chat`. Where the task is cancelled, the answer is given up at once."""
        return await self._astream(_chatted(messages, options)).read()

    def astream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        """As `stream`, for `async for`."""
        return self._astream(_prompted(prompt, options))

    def astream_chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> AsyncStream:
        """As `stream_chat`, for `async for`."""
        return self._astream(_chatted(messages, options))

    def _astream(self, query: Query) -> AsyncStream:
        begin: Callable[[], Stream] = lambda: self._stream(query)  # noqa: E731 - the type is checked
        return AsyncStream(begin)


def _prompted(prompt: Prompt, options: Options) -> Query:
    return Query(_checked_prompt(prompt), None, _checked_options(options))


def _chatted(messages: Sequence[Message], options: Options) -> Query:
    return Query(None, _checked_messages(messages), _checked_options(options))


def _checked_prompt(prompt: object) -> str | list[int]:
    """Raises PromptError for what is neither text nor token ids: a list of texts is no prompt."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, (bytes, bytearray, Mapping)):
        raise PromptError(f"the prompt is a {type(prompt).__name__}, neither text nor a list of token ids")
    try:
        tokens = [operator.index(token) for token in prompt]  # type: ignore[attr-defined]
    except TypeError as error:
        raise PromptError(
            f"the prompt is neither text nor a list of token ids ({error}); ask for several answers one by one, each "
            "in a thread or task of its own"
        ) from error
    if not tokens:
        raise PromptError("the prompt is empty; give a text or token ids")
    if min(tokens) < 0:
        raise PromptError(f"the prompt has token {min(tokens)}; allowed: 0 or above")
    return tokens


def _checked_messages(messages: object) -> list[dict[str, Any]]:
    """Raises ConfigError."""
    if messages and isinstance(messages, Sequence) and all(isinstance(one, Mapping) for one in messages):
        try:
            json.dumps(found := [dict(one) for one in messages])
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"messages has what is no JSON ({error}); give texts") from error
        return found
    raise ConfigError(f"messages is {messages!r}; allowed: a list such as [{{'role': 'user', 'content': 'Hello'}}]")


def _checked_options(options: Options) -> Options:
    """Each as its type. Raises ConfigError."""
    check_names(options, Options.__annotations__, "an option of an answer")
    return checked(options)
