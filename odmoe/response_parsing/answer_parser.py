"""What parsers of answers share: deltas of a message, and the text of a call while it comes."""

from __future__ import annotations

import secrets
import string
from typing import Any, Protocol

from odmoe.response_parsing.calls import CallPiece, CallReader

Delta = dict[str, Any]
"""What is new of a message: `content`, `reasoning_content` or `tool_calls`, as in OpenAI's chunks."""


class AnswerParser(Protocol):
    """Of one answer."""

    def push(self, text: str) -> list[Delta]:
        """What the next part of the answer adds. Its special tokens are part of it if they mark something."""

    def finish(self, cut: bool) -> list[Delta]:
        """What the end adds. `cut`: by the length; else the model, or a stop text, has ended it."""


class Writer:
    """Makes deltas. Blanks between content and what stands beside it are left out."""

    def __init__(self, parallel: bool = True, id_length: int | None = None) -> None:
        """`parallel`: more than one call may be given. `id_length`: of ids of letters and digits."""
        self._parallel, self._id_length = parallel, id_length
        self._blanks = {"content": "", "reasoning_content": ""}
        self._is_fresh = {"content": False, "reasoning_content": True}
        self._calls = 0
        self._is_full = False

    def text(self, field: str, text: str) -> list[Delta]:
        if self._is_fresh[field]:
            text = text.lstrip()
        text = self._blanks[field] + text
        shown = text.rstrip()
        self._blanks[field] = text[len(shown) :]
        if not shown:
            return []
        self._is_fresh[field] = False
        return [{field: shown}]

    def begin_region(self) -> None:
        """Something other than content begins, or has been before."""
        self._is_fresh["content"] = True
        self._blanks = dict.fromkeys(self._blanks, "")

    def end(self) -> list[Delta]:
        """Blanks at the end are part of a content after which nothing comes."""
        blanks = self._blanks["content"]
        return [{"content": blanks}] if blanks else []

    def call(self, pieces: list[CallPiece]) -> list[Delta]:
        found: list[Delta] = []
        for piece in pieces:
            self._is_full |= piece.name is not None and self._calls > 0 and not self._parallel
            if self._is_full:
                break
            call: dict[str, Any] = {"index": self._calls - 1}
            if piece.name is not None:
                call = {"index": self._calls, "id": piece.call_id or self._new_id(), "type": "function"}
                call["function"] = {"name": piece.name, "arguments": piece.arguments}
                self._calls += 1
            else:
                call["function"] = {"arguments": piece.arguments}
            found.append({"tool_calls": [call]})
        return found

    def _new_id(self) -> str:
        if self._id_length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self._id_length))


class CallRegion:
    """Between the marks of a call. `piecewise`: it is given as it comes, and what was given of a broken call stays;
    else only whole calls are given. What is no call is content."""

    def __init__(self, reader: CallReader, opened: str, writer: Writer, piecewise: bool) -> None:
        """`opened`: the mark before it."""
        self._reader, self._writer, self._piecewise = reader, writer, piecewise
        self._raw = opened
        """What was not given yet."""
        self._found: list[CallPiece] = []
        self._is_given = False

    def push(self, text: str) -> list[Delta]:
        self._raw += text
        self._found += self._reader.push(text)
        if self._reader.is_broken and not self._is_given:
            return self._as_text()
        return self._give() if self._piecewise else []

    def end(self, closed: bool, mark: str = "") -> list[Delta]:
        """`closed`: by the model; else the answer was cut. `mark`: the one after it."""
        self._found += self._reader.end(closed)
        self._raw += mark
        if self._reader.is_whole:
            return self._give()
        return [] if self._is_given and not closed else self._as_text()

    def _give(self) -> list[Delta]:
        if self._reader.is_broken or not self._found:
            return []
        if not self._is_given:
            self._writer.begin_region()
        found, self._found, self._raw, self._is_given = self._found, [], "", True
        return self._writer.call(found)

    def _as_text(self) -> list[Delta]:
        raw, self._raw, self._found = self._raw, "", []
        return self._writer.text("content", raw)
