"""Tool calls that are written as JSON, piece by piece: `{"name": ..., "arguments": {...}}`, or a list of such."""

from __future__ import annotations

import json
import re
from typing import Any

from odmoe.response_parsing.calls import CallPiece

_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{\Z')
"""Up to the arguments, in the order in which models write a call."""
_MOST_CHECKED = 1 << 16
"""Characters of arguments that are checked anew with each piece: beyond it only the whole is."""


class JsonExtent:
    """Follows a JSON object or list by its brackets and strings, to see where it ends."""

    def __init__(self) -> None:
        self.depth = 0
        self._is_string = self._is_escaped = False

    def take(self, char: str) -> str:
        """The next character, which may be escaped: models write line breaks within strings, which JSON forbids."""
        if self._is_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._is_string = False
            elif char < " ":
                return json.dumps(char)[1:-1]
        elif char == '"':
            self._is_string = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1
        return char


class Arguments:
    """The arguments of one call, which begin with a brace."""

    def __init__(self) -> None:
        self.text = ""
        self._extent = JsonExtent()
        self._given = 0
        self.is_broken = False

    @property
    def is_whole(self) -> bool:
        return bool(self.text) and self._extent.depth == 0

    def take(self, text: str) -> int:
        """How many of the characters belong to the arguments."""
        parts = []
        for count, char in enumerate(text, 1):
            parts.append(self._extent.take(char))
            if self._extent.depth == 0:
                self.text += "".join(parts)
                return count
        self.text += "".join(parts)
        return len(text)

    def piece(self) -> str:
        """What is new. Nothing once it is no JSON any more."""
        if not self.is_broken and (self.is_whole or len(self.text) <= _MOST_CHECKED):
            self.is_broken = not _begins_json(self.text, self.is_whole)
        if self.is_broken:
            return ""
        found, self._given = self.text[self._given :], len(self.text)
        return found


def _begins_json(text: str, whole: bool) -> bool:
    from pydantic_core import from_json

    try:
        from_json(text, allow_partial="off" if whole else "trailing-strings")
    except ValueError:
        return False
    return True


class JsonCalls:
    """One call, several in a list, or one after another. `is_whole`: no call is cut or broken."""

    def __init__(self) -> None:
        self.is_broken = False
        self._object = ""
        """The call under way, up to its arguments; all of it if they do not come second."""
        self._extent = JsonExtent()
        self._arguments: Arguments | None = None
        self._count = 0

    @property
    def is_whole(self) -> bool:
        """A last brace that is missing does no harm."""
        is_open = bool(self._object) and not (self._arguments is not None and self._arguments.is_whole)
        return self._count > 0 and not is_open and not self.is_broken

    def push(self, text: str) -> list[CallPiece]:
        found: list[CallPiece] = []
        while text and not self.is_broken:
            text = self._step(text, found)
        return found

    def end(self, closed: bool) -> list[CallPiece]:
        return []

    def _step(self, text: str, found: list[CallPiece]) -> str:
        """Takes some of the text. What is left."""
        if not self._object:
            text = text.lstrip("[], \t\r\n;")
            if text and text[0] != "{":
                self.is_broken = True
            elif text:
                self._object, text = self._extent.take("{"), text[1:]
            return text
        if self._arguments is not None and not self._arguments.is_whole:
            text = text[self._arguments.take(text) :]
            piece = self._arguments.piece()
            self.is_broken = self._arguments.is_broken
            if piece:
                found.append(CallPiece(None, piece))
            return text
        return self._take_object(text, found)

    def _take_object(self, text: str, found: list[CallPiece]) -> str:
        for count, char in enumerate(text, 1):
            if char == "{" and self._arguments is None and (head := _HEAD.match(self._object + char)):
                try:
                    name = json.loads(head[1])
                except ValueError:  # a bad escape
                    self.is_broken = True
                    return ""
                self._arguments = Arguments()
                self._count += 1
                found.append(CallPiece(name, ""))
                return text[count - 1 :]
            self._object += self._extent.take(char)
            if self._extent.depth == 0:
                self._end_object(found)
                return text[count:]
        return ""

    def _end_object(self, found: list[CallPiece]) -> None:
        whole, self._object = self._object, ""
        if self._arguments is not None:
            self._arguments = None
            return
        call = whole_call(whole)
        if call is None:
            self.is_broken = True
            return
        self._count += 1
        found.append(call)


def whole_call(text: str) -> CallPiece | None:
    """A call in any order of its parts. None: it is none."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict):
        return None
    return call_of(given)


def call_of(given: dict[str, Any]) -> CallPiece | None:
    """A call from `{"name", "arguments"}`, perhaps within `function`. None if it has no name, or its arguments are
    no object."""
    function = given.get("function")
    function = function if isinstance(function, dict) else given
    name = function.get("name")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            return None
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    call_id = given.get("id")
    text = json.dumps(arguments, ensure_ascii=False)
    return CallPiece(name, text, call_id if isinstance(call_id, str) else None)
