"""Tool calls whose name stands in a header before JSON arguments."""

from __future__ import annotations

import re

from odmoe.response_parsing.calls import CallPiece
from odmoe.response_parsing.json_calls import Arguments, JsonCalls

_MOST_HEADER = 512
"""Characters, beyond which it is none."""


class HeaderCall:
    """One call. What follows its arguments, such as the end of a code block, is left out."""

    def __init__(self, header: re.Pattern[str]) -> None:
        """`header`: has a group `name` and perhaps `id`; the arguments' brace comes next."""
        self._header = header
        self._text = ""
        self._arguments: Arguments | None = None
        self.is_broken = False

    @property
    def is_whole(self) -> bool:
        return self._arguments is not None and self._arguments.is_whole and not self.is_broken

    def push(self, text: str) -> list[CallPiece]:
        found: list[CallPiece] = []
        if self.is_broken or self.is_whole:
            return found
        if self._arguments is None:
            self._text += text
            match = self._header.match(self._text)
            if match is None or not self._text.startswith("{", match.end()):
                before = self._text.partition("{")
                self.is_broken = len(self._text) > _MOST_HEADER or bool(before[1])
                return found
            groups = match.groupdict()
            found.append(CallPiece(groups["name"].strip(), "", groups.get("id")))
            self._arguments, text = Arguments(), self._text[match.end() :]
        self._arguments.take(text)
        if piece := self._arguments.piece():
            found.append(CallPiece(None, piece))
        self.is_broken = self._arguments.is_broken
        return found

    def end(self, closed: bool) -> list[CallPiece]:
        return []


class NamedCall(HeaderCall):
    """The arguments of a call whose name is known."""

    def __init__(self, name: str) -> None:
        super().__init__(re.compile(rf"(?P<name>{re.escape(name)})\s*"))
        self._text = name


class HeaderOrJson:
    """A call with a header, or calls as JSON: the first character says which."""

    def __init__(self, header: re.Pattern[str]) -> None:
        self._header = header
        self._reader: HeaderCall | JsonCalls | None = None

    @property
    def is_whole(self) -> bool:
        return self._reader is not None and self._reader.is_whole

    @property
    def is_broken(self) -> bool:
        return self._reader is not None and self._reader.is_broken

    def push(self, text: str) -> list[CallPiece]:
        if self._reader is None:
            text = text.lstrip()
            if not text:
                return []
            self._reader = JsonCalls() if text[0] in "{[" else HeaderCall(self._header)
        return self._reader.push(text)

    def end(self, closed: bool) -> list[CallPiece]:
        return [] if self._reader is None else self._reader.end(closed)
