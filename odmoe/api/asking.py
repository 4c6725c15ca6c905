"""What is asked of a model, checked before anything is computed."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from odmoe.api.names import check_names
from odmoe.api.options import Options, check_options
from scheduler.errors import ConfigError, PromptError

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


def prompt_query(prompt: Prompt, options: Options) -> Query:
    """Raises PromptError, ConfigError."""
    return Query(_checked_prompt(prompt), None, _checked_options(options))


def chat_query(messages: Sequence[Message], options: Options) -> Query:
    """Raises ConfigError."""
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
    return check_options(options)
