"""A chat in the model's own template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from odmoe import chat


def chat_text(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """The chat up to where the answer begins. Raises ConfigError where the model has no chat template, or one that
    refuses this chat."""
    return chat.chat_text(tokenizer, messages)
