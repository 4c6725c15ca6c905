"""A conversation so far, and its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scheduler.errors import ConfigError

_ROLES = ("system", "user", "assistant")


class Transcript:
    """Messages as OpenAI's API has them, the system message first."""

    def __init__(self, system: str | None = None) -> None:
        self.messages: list[dict[str, str]] = []
        self.set_system(system)

    def set_system(self, text: str | None) -> None:
        """Replace the system message; None or an empty text takes it away."""
        kept = [one for one in self.messages if one["role"] != "system"]
        self.messages = [*([{"role": "system", "content": text}] if text else []), *kept]

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages = [one for one in self.messages if one["role"] == "system"]

    def add(self, role: str, content: str) -> None:
        """Add a message at the end."""
        self.messages.append({"role": role, "content": content})

    def take_back(self) -> None:
        """Forget the last message, to which there is no answer."""
        self.messages.pop()

    @property
    def turns(self) -> int:
        """Messages of the user."""
        return sum(one["role"] == "user" for one in self.messages)

    def save(self, file: Path, model: str) -> None:
        """Write the conversation as JSON. Raises ConfigError."""
        try:
            file.write_text(
                json.dumps({"model": model, "messages": self.messages}, ensure_ascii=False, indent=1) + "\n"
            )
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror}; choose another place") from error

    def load(self, file: Path) -> None:
        """Read a conversation that `save` wrote, or a list of messages, in place of this one. Raises ConfigError."""
        try:
            found = json.loads(file.read_text())
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}; check the path") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file} is not JSON ({error}); give a file that /save has written") from error
        self.messages = _checked(file, found.get("messages") if isinstance(found, dict) else found)


def plain_text(messages: list[dict[str, str]]) -> str:
    """All messages as one text, for a model without a chat template to continue."""
    return "".join(one["content"] for one in messages)


def _checked(file: Path, found: Any) -> list[dict[str, str]]:
    if not isinstance(found, list):
        raise ConfigError(f"{file} has no list of messages; give a file that /save has written")
    for number, one in enumerate(found):
        fine = isinstance(one, dict) and one.get("role") in _ROLES and isinstance(one.get("content"), str)
        if not fine:
            raise ConfigError(
                f"message {number} of {file} is {one!r}; allowed: a role of {', '.join(_ROLES)}, and text"
            )
    return [{"role": one["role"], "content": one["content"]} for one in found]
