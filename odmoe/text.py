"""Prompts to token ids, and token ids to text, a piece at a time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from scheduler.errors import CorruptStoreError, PromptError

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""A token that is one byte of text (SentencePiece's byte fallback)."""


def load_tokenizer(folder: Path) -> Any:
    """The model's own tokenizer. Raises CorruptStoreError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises Exception itself
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CorruptStoreError(
            f"no tokenizer can be read from {folder}: {reason}; are the model's tokenizer files whole?"
        ) from error


def encode(tokenizer: Any, prompt: str, context: int) -> list[int]:
    """Token ids, special tokens added as the tokenizer does. Raises PromptError; nothing is ever cut off."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"the prompt is not UTF-8 text (character {error.start}); convert it") from error
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
        self._start = 0  # decoding begins here
        self._taken = 0  # the tokens before have been given out
        self._given = ""  # as this text, from `_start` on

    def push(self, token: int) -> str:
        """The text that this token completes, often empty within a multi-byte character."""
        self._ids.append(token)
        # One byte more may make another text of all bytes before it, even past a token that is skipped.
        one = self._tokenizer.convert_ids_to_tokens(token)
        if _BYTE.fullmatch(one or "") or not self._decode(len(self._ids) - 1):
            return ""
        text = self._decode(self._start)
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else self._take(text)

    def flush(self) -> str:
        """What is left at the end, whole or not."""
        return self._take(self._decode(self._start))

    def _decode(self, start: int) -> str:
        text: str = self._tokenizer.decode(self._ids[start:], skip_special_tokens=True)
        return text

    def _take(self, text: str) -> str:
        piece, self._given = text[len(self._given) :], text
        before, self._taken = self._taken, len(self._ids)
        if piece.endswith("\n"):
            # Nothing joins over a line's end. Its tokens stay as a beginning: many tokenizers strip the first space.
            line = self._decode(before)
            if line:
                self._start, self._given = before, line
        return piece
