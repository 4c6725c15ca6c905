"""Prompts: as an argument, in a file, or on standard input."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

from scheduler.errors import ConfigError, PromptError


def read_prompts(prompt: str | None, file: Path | None) -> list[str]:
    """The prompts of the argument, the file or standard input. Raises PromptError, ConfigError."""
    if file is None:
        found = [_standard_input() if prompt is None else prompt]
    elif prompt is not None:
        raise ConfigError(f"a prompt and --prompts {file} are both given; give one of them")
    else:
        try:
            lines = [line for line in file.read_text().split("\n") if line.strip()]
        except OSError as error:
            raise PromptError(f"--prompts {file} cannot be read: {error.strerror}; check the path") from error
        except UnicodeDecodeError as error:
            raise PromptError(
                f"--prompts {file} is not {error.encoding} text (byte {error.start}); convert it"
            ) from error
        if not lines:
            raise PromptError(f"--prompts {file} is empty; give a file with a prompt on each line")
        found = [_unquote(line) for line in lines]
    if not found or not all(found):
        raise PromptError("the prompt is empty; give it as an argument, in --prompts or on standard input")
    return found


def _unquote(line: str) -> str:
    """A line that is a JSON string, as the text that it stands for."""
    if line.startswith('"'):
        with contextlib.suppress(ValueError):
            text = json.loads(line)
            return text if isinstance(text, str) else line
    return line


def _standard_input() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise PromptError("no prompt is given; give it as an argument, in --prompts or on standard input")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise PromptError(f"the prompt is not {error.encoding} text (byte {error.start}); convert it") from error
