"""What single tokens stand for."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from odmoe.text import continuation

_LONGEST_CHARACTER = 4
"""Most tokens of one: its bytes."""


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

    def dropped_chars(self, token: int) -> int:
        """How many characters the token loses where a text begins with it: many tokenizers leave out the first
        space."""
        text: str = self._tokenizer.decode([token], skip_special_tokens=True)
        whole = self._bytes(token).decode(errors="replace")
        return len(whole) - len(text) if whole.endswith(text) else 0

    def is_special(self, token: int) -> bool:
        """Special tokens are no part of a text."""
        return token in self._special


class Offsets:
    """Where each token of a text begins in it, in characters."""

    def __init__(self, texts: TokenTexts, before: Iterable[int] = ()) -> None:
        """`before`: tokens that the text continues, perhaps within a character."""
        self._texts, self._at = texts, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        shown = [token for token in before if not texts.is_special(token)]
        self._begun = bool(shown)
        for token in shown[-_LONGEST_CHARACTER:]:
            self._decoder.decode(texts.bytes_of(token))

    def offsets_of(self, tokens: Iterable[int]) -> list[int]:
        """Of the next tokens."""
        found = []
        for token in tokens:
            found.append(self._at)
            if not self._texts.is_special(token):
                length = len(self._decoder.decode(self._texts.bytes_of(token)))
                self._at += length if self._begun else length - self._texts.dropped_chars(token)
                self._begun = True
        return found


def _decoder(tokenizer: Any) -> Any:
    """A function from a token id to its bytes."""
    from llguidance.hf import from_tokenizer

    try:
        vocabulary = from_tokenizer(tokenizer)
    except Exception:  # noqa: BLE001 - it is only there for the bytes of parts of characters
        before = _word(tokenizer)
        return lambda token: continuation(tokenizer, before, [token], special=True).encode()
    return lambda token: bytes(vocabulary.decode_bytes([token])) if token < vocabulary.vocab_size else b""


def _word(tokenizer: Any) -> list[int]:
    """A token after which the next one reads as within a text."""
    ordinary = (token for token in range(len(tokenizer)) if token not in tokenizer.all_special_ids)
    return [next((token for token in ordinary if str(tokenizer.decode([token])).isalpha()), 0)]
