"""What single tokens stand for."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from functools import lru_cache
from typing import Any


class TokenTexts:
    """The bytes and the text of each token of a vocabulary."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._bytes = lru_cache(maxsize=65536)(_decoder(tokenizer))

    def bytes_of(self, token: int) -> bytes:
        return self._bytes(token)

    def text_of(self, token: int) -> str:
        """Its text; of a token that is part of a character, `bytes:` and its bytes, as OpenAI writes it."""
        data = self._bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def is_special(self, token: int) -> bool:
        """Special tokens are no part of a text."""
        return token in self._special


class Offsets:
    """Where each token of a text begins in it, in characters."""

    def __init__(self, texts: TokenTexts, start: int = 0) -> None:
        """`start`: where the first one begins."""
        self._texts, self._at = texts, start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, tokens: Iterable[int]) -> list[int]:
        """Of the next tokens."""
        found = []
        for token in tokens:
            found.append(self._at)
            if not self._texts.is_special(token):
                self._at += len(self._decoder.decode(self._texts.bytes_of(token)))
        return found


def _decoder(tokenizer: Any) -> Any:
    """A function from a token id to its bytes."""
    from llguidance.hf import from_tokenizer

    try:
        vocabulary = from_tokenizer(tokenizer)
    except Exception:  # noqa: BLE001 - it is only there for the bytes of parts of characters
        return lambda token: str(tokenizer.decode([token])).encode()
    return lambda token: bytes(vocabulary.decode_bytes([token])) if token < vocabulary.vocab_size else b""
