"""What a conversation needs of a model, wherever it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Message = Mapping[str, str]
"""`{"role": "user", "content": "..."}`."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What came next of an answer."""

    text: str = ""
    reasoning: str = ""
    """What the model thinks before its answer (`reasoning_content` of OpenAI-like services)."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one answer; times in seconds, None if it is not known."""

    prompt_tokens: int | None
    cached_tokens: int | None
    """Of `prompt_tokens`, those that were not computed again."""
    new_tokens: int | None
    first_token_s: float | None
    tokens_per_s: float | None
    """Tokens after the first, over the time that they took."""
    finish: str | None
    """`stop`, `length` and so on."""


class Answer(Protocol):
    """One answer under way. One thread iterates over it; any thread may cancel it."""

    def __iter__(self) -> Iterator[Delta]:
        """Raises RequestError, PromptError, ConfigError, ClusterError."""

    def cancel(self) -> None:
        """Give the answer up. The thread that iterates over it gets an error or the end."""

    @property
    def figures(self) -> Figures:
        """Those known so far; all of them after the last delta."""


class ChatModel(Protocol):
    """A model that answers conversations."""

    @property
    def name(self) -> str:
        """As people know it."""

    def names(self) -> Sequence[str]:
        """Other models that `choose` takes; empty if they cannot be listed. Raises ClusterError."""

    def choose(self, name: str) -> None:
        """Answer with another model from now on. Raises ODMoEError, after which the former one still answers, or is
        started again."""

    def answer(self, messages: Sequence[Message]) -> Answer:
        """The answer to a conversation, of which nothing is computed before it is iterated over. Raises PromptError,
        ConfigError."""

    def close(self) -> None:
        """Free what it holds. Any number of calls."""
