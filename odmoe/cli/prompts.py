"""Prompts: as an argument, in a file, or on standard input."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

from scheduler.errors import ConfigError, PromptError


def read_prompts(prompt: str | None, file: Path | None) -> list[str]:
    """What was asked, one way or the other. Raises PromptError, ConfigError."""
    if file is None:
        asked = [_standard_input() if prompt is None else prompt]
    elif prompt is not None:
        raise ConfigError(f"a prompt and --prompts {file} are both given; give one of them")
    else:
        try:
            lines = [line for line in file.read_text().split("\n") if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise PromptError(f"--prompts {file} cannot be read: {error}") from error
        asked = [_unquoted(line) for line in lines]
    if not asked or not all(asked):
        raise PromptError("the prompt is empty; give it as an argument, in --prompts or on standard input")
    return asked


def _unquoted(line: str) -> str:
    if line.startswith('"'):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            return found if isinstance(found, str) else line
    return line


def _standard_input() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise PromptError("no prompt; give it as an argument or on standard input")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise PromptError(f"the prompt is not {error.encoding} text (byte {error.start}); convert it") from error
