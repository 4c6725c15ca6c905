"""Which answer a draft continues: a checksum of the answer's tokens, so that a draft of another one is told from it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

START = 0
"""Of an answer without a token."""


def extend(path: int, tokens: Iterable[int]) -> int:
    """The path of an answer that goes on with these tokens."""
    for token in tokens:
        path = zlib.crc32(token.to_bytes(4, "little"), path)
    return path
