"""Token ids to text, a piece at a time."""

from __future__ import annotations

from typing import Any


class TextStream:
    """Pieces that add up to the tokenizer's own decoding of the whole; a piece waits until its characters are whole."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0
        self._given = ""

    def push(self, token: int) -> str:
        """The text that this token completes, often empty within a multi-byte character."""
        self._ids.append(token)
        text = self._decode()
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        return self._take(text)

    def flush(self) -> str:
        """What is left at the end, whole or not."""
        return self._take(self._decode())

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._ids[self._start :], skip_special_tokens=True)
        return text

    def _take(self, text: str) -> str:
        piece, self._given = text[len(self._given) :], text
        if piece.endswith("\n"):  # nothing joins over a line's end: decode only what follows from here on
            self._start, self._given = len(self._ids), ""
        return piece
