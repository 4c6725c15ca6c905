"""A chat in the model's own template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.errors import ConfigError


def chat_text(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """The chat up to where the answer begins. Raises ConfigError where the model has no chat template, or one that
    refuses this chat."""
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("the model has no chat template; give a prompt (generate), or use an instruct model")
    return templated(tokenizer, [dict(one) for one in messages])


def templated(tokenizer: Any, messages: list[dict[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
    """The messages in the model's chat template, up to where the answer begins. `variables`: of the template, `tools`
    among them. Raises ConfigError where the template refuses them."""
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **(variables or {})
        )
    except Exception as error:  # Jinja's own, or one that the template raises
        raise ConfigError(f"the model's chat template refuses this chat: {error}") from error
    return text
