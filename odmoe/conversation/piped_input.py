"""Standard input without a terminal: all of it is one message."""

from __future__ import annotations

import sys

from scheduler.errors import PromptError


def piped_message() -> str:
    """What is on standard input, up to its end. Raises PromptError."""
    try:
        text = sys.stdin.read() if sys.stdin is not None else ""
    except UnicodeDecodeError as error:
        raise PromptError(f"the message is not {error.encoding} text (byte {error.start}); convert it") from error
    if not text.strip():
        raise PromptError("the message on standard input is empty; write one, or run odmoe chat on a terminal")
    return text.rstrip("\n")
