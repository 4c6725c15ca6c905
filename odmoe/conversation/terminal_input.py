"""Messages as a person types them: several lines, a history, pasted text."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings

PROMPT = ">>> "
QUOTES = ("'''", '"""')


def history_file() -> Path:
    """`$XDG_STATE_HOME/odmoe/chat-history`, or below `~/.local/state`."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "odmoe" / "chat-history"


class TerminalInput:
    """A line editor on standard error, so that standard output has answers alone."""

    def __init__(self, say: Callable[[str], None], forgive: Callable[[], bool]) -> None:
        """`forgive`: tells whether an interrupt was Ctrl-C, after which the conversation goes on."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import create_output

        self._say, self._forgive = say, forgive
        self._session: PromptSession[str] = PromptSession(
            message=PROMPT,
            multiline=True,
            prompt_continuation="... ",
            key_bindings=_keys(),
            history=_history(),
            output=create_output(stdout=sys.stderr),
        )

    def read(self) -> str | None:
        """The next message that is not empty; None to leave, at Ctrl-D or a second Ctrl-C at an empty prompt."""
        is_leaving = False
        while True:
            try:
                # The editor sees the key; another handler of the signal would make SIGTERM wait for it.
                text = message_of(self._session.prompt(handle_sigint=False))
            except EOFError:
                return None
            except KeyboardInterrupt:
                if not self._forgive():
                    raise
                was_empty = not self._session.default_buffer.text
                if was_empty and is_leaving:
                    return None
                is_leaving = was_empty
                if was_empty:
                    self._say("Ctrl-C again, or Ctrl-D, leaves")
                continue
            if text.strip():
                return text
            is_leaving = False


def is_open(text: str) -> bool:
    """Whether more lines follow: after a trailing backslash, or within a block of three quotes."""
    quotes = next((one for one in QUOTES if text.lstrip().startswith(one)), None)
    if quotes is not None:
        body = text.lstrip()[len(quotes) :]
        return not body.rstrip().endswith(quotes)
    return text.endswith("\\")


def message_of(text: str) -> str:
    """The text without the marks of its lines: quotes around a block, backslashes before the end of a line."""
    stripped = text.strip()
    for quotes in QUOTES:
        if stripped.startswith(quotes) and stripped.endswith(quotes) and len(stripped) >= 2 * len(quotes):
            return stripped[len(quotes) : -len(quotes)].strip("\n")
    return text.replace("\\\n", "\n")


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def on_enter(event: Any) -> None:
        buffer = event.current_buffer
        if is_open(buffer.document.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def on_alt_enter(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history() -> Any:
    """Readable by its owner alone. If it cannot be written, a history of this conversation."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    file = history_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(file))
