"""What can be asked of a model, whether its nodes run in this process or a server answers for it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from odmoe.api.async_stream import AsyncStream
from odmoe.api.completion import Completion, Stream
from odmoe.api.names import check_names
from scheduler.closing import Closing
from scheduler.errors import ConfigError

Prompt = str | Sequence[int]
"""Text, or token ids."""
Message = Mapping[str, Any]
"""`{"role": "user", "content": "..."}`, as the model's chat template takes it."""


class Options(TypedDict, total=False):
    """How to answer. What is left out is as was given to `odmoe.load`, else its default; of a served model, as the
    server has it."""

    max_new_tokens: int
    """128 by default."""
    temperature: float | None
    """0 takes the most probable token; so does a loaded model without any of temperature, top_p, top_k and sample."""
    top_p: float | None
    top_k: int | None
    sample: bool
    """Draw with the model's own generation settings."""
    seed: int | None
    stop: str | Sequence[str]
    """The answer ends before any of these texts."""
    ignore_eos: bool
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    """Token id -> what is added to its logit."""
    logprobs: int | None
    """Of each token of the answer: its log-probability, and those of the N most probable tokens."""
    prompt_logprobs: int | None
    """The same of the prompt's tokens."""
    schema: str | Mapping[str, Any] | None
    """A JSON schema that the answer follows."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    prompt: Prompt | None
    messages: Sequence[Message] | None
    """Of a chat, in place of a prompt."""
    options: Options


class AnyModel(Closing):
    """A model, loaded or served: it answers prompts and chats. Several answers may be open at once, in a thread or a
    task each."""

    @abstractmethod
    def _begin(self, asked: Asked) -> Stream:
        """The answer's stream. Nothing is computed before its first chunk is asked for. Raises ConfigError,
        PromptError."""

    @abstractmethod
    def close(self) -> None:
        """Free what was started or opened for this model. Any number of calls."""

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole answer to a prompt. Raises PromptError, ConfigError, RequestError, ClusterError."""
        return self._begin(_prompted(prompt, options)).read()

    def chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Completion:
        """The whole answer to a chat, in the model's chat template. Raises what `generate` raises."""
        return self._begin(_chatted(messages, options)).read()

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """The answer to a prompt, in chunks as they come. Iterating raises what `generate` raises."""
        return self._begin(_prompted(prompt, options))

    def stream_chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Stream:
        """The answer to a chat, in chunks as they come."""
        return self._begin(_chatted(messages, options))

    async def agenerate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """As `generate`. Where the task is cancelled, the answer is given up at once."""
        return await self._abegin(_prompted(prompt, options)).read()

    async def achat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Completion:
        """As `chat`. Where the task is cancelled, the answer is given up at once."""
        return await self._abegin(_chatted(messages, options)).read()

    def astream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        """As `stream`, for `async for`."""
        return self._abegin(_prompted(prompt, options))

    def astream_chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> AsyncStream:
        """As `stream_chat`, for `async for`."""
        return self._abegin(_chatted(messages, options))

    def _abegin(self, asked: Asked) -> AsyncStream:
        begin: Callable[[], Stream] = lambda: self._begin(asked)  # noqa: E731 - the type is checked
        return AsyncStream(begin)


def _prompted(prompt: Prompt, options: Options) -> Asked:
    check_names(options, Options.__annotations__, "an option of an answer")
    return Asked(prompt, None, options)


def _chatted(messages: Sequence[Message], options: Options) -> Asked:
    check_names(options, Options.__annotations__, "an option of an answer")
    if isinstance(messages, (str, Mapping)) or not all(isinstance(one, Mapping) for one in messages):
        raise ConfigError(f"messages is {messages!r}; allowed: a list such as [{{'role': 'user', 'content': 'Hello'}}]")
    return Asked(None, messages, options)
