"""The API keys of `odmoe serve`: a file of them, a key a line, each with a name and limits if it needs them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from scheduler.errors import ConfigError

LEAST_KEY = 16
"""Characters of an API key: a shorter one can be guessed."""
LIMITS = {"at-once": "at_once", "per-minute": "per_minute"}
"""What may follow a key in its line, and the field that it sets."""
LINE = "KEY, or NAME:KEY, then if needed at-once=N and per-minute=N"
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_COUNT = re.compile(r"[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """`name`: in the log, in place of the key. `at_once`, `per_minute`: its most requests for answers; None: any."""

    key: str = field(repr=False)
    name: str | None = None
    at_once: int | None = None
    per_minute: int | None = None


def check_key(key: str, source: str) -> str:
    """Raises ConfigError for a key that is not valid. `source`: where it is from, for the message."""
    if len(key) < LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{source} has a key of {len(key)} characters that is not valid (it is not shown); allowed: at "
            f"least {LEAST_KEY} ASCII characters without spaces"
        )
    return key


def read_key_file(file: str, source: str) -> tuple[ApiKey, ...]:
    """Lines that are empty or begin with # count for nothing. Raises ConfigError naming `source` and the line."""
    try:
        lines = Path(file).expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{source} cannot be read: {why}; check the path") from error
    stripped = [(number, line.strip()) for number, line in enumerate(lines, 1)]
    keys = tuple(_parse(line, f"{source} line {number}") for number, line in stripped if line and line[0] != "#")
    if not keys:
        raise ConfigError(f"{source} has no key; write one into each line")
    if len({one.key for one in keys}) < len(keys):
        raise ConfigError(f"{source} has a key twice; give each line a key of its own")
    return keys


def _parse(line: str, source: str) -> ApiKey:
    first, *more = line.split()
    name, colon, rest = first.partition(":")
    if colon and not _NAME.fullmatch(name):
        raise ConfigError(f"{source} has a name that is not valid; allowed: 1 to 64 of A-Z a-z 0-9 . _ @ -")
    key = check_key(rest if colon else first, source)
    limits: dict[str, int] = {}
    for one in more:
        limit, _, count = one.partition("=")
        if limit not in LIMITS or not _COUNT.fullmatch(count):
            # A key with a space in it would be shown otherwise.
            raise ConfigError(f"{source} has words after the key that are not valid; allowed: {LINE}")
        limits[LIMITS[limit]] = int(count)
    return ApiKey(key, name if colon else None, **limits)
