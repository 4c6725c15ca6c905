"""Prompts to token ids, and token ids to text, a piece at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scheduler.errors import CorruptStoreError, PromptError


def load_tokenizer(folder: Path) -> Any:
    """The model's own tokenizer. Raises CorruptStoreError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CorruptStoreError(f"no tokenizer can be read from {folder}: {str(error).splitlines()[0]}") from error


def encode(tokenizer: Any, prompt: str, context: int) -> list[int]:
    """Token ids, special tokens added as the tokenizer does. Raises PromptError; nothing is ever cut off."""
    ids: list[int] = tokenizer(prompt)["input_ids"]
    if not prompt or not ids:
        raise PromptError("the prompt is empty; give it as an argument or on standard input")
    if len(ids) >= context:
        raise PromptError(f"the prompt has {len(ids)} tokens, the model's context is {context}; shorten it")
    return ids


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
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else self._take(text)

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
