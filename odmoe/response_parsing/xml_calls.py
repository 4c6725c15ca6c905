"""Tool calls that are written as tags, a tag a parameter."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from odmoe.response_parsing.calls import CallPiece
from odmoe.response_parsing.json_calls import JsonCalls

_TYPED: dict[str, Any] = {
    "start_anchor_pattern": r"\A",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\A(?P<name>[^\n]*)\n",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"\A(?P<key>[^\n]*)\n(?P<value>.*)\Z"},
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        }
    },
}
"""One parameter of a call, for Transformers' own reading of values by the tool's schema."""


class Tags(NamedTuple):
    """How a family writes a call: patterns."""

    name: re.Pattern[str]
    """With a group `name`."""
    parameter: re.Pattern[str]
    """With groups `key` and `value`."""
    begin: str
    """With which a parameter begins."""

    @property
    def close(self) -> str:
        """With which a parameter ends."""
        return self.parameter.pattern[self.parameter.pattern.rindex("</") :]


TypedValue = Callable[[str, str, str], Any]
"""(tool, parameter, text) -> the value, as the tool's schema has it."""


def typed_by(tools: list[dict[str, Any]]) -> TypedValue:
    """A text if the schema does not say. `tools`: as OpenAI's API has them."""
    from transformers.utils.chat_parsing import parse_response

    def typed(tool: str, key: str, value: str) -> Any:
        found = parse_response(f"{tool}\n{key}\n{value}", _TYPED, prefix="", tools=tools)
        return found["tool_calls"]["function"]["arguments"].get(key, value)

    return typed


class XmlCall:
    """One call. Each parameter is given once it is whole. Also reads a call that is JSON in place of tags."""

    def __init__(self, tags: Tags, typed: TypedValue) -> None:
        self._tags, self._typed = tags, typed
        self._text = ""
        self._name: str | None = None
        self._searched = 0
        """Before this no closing tag of the text begins that would end a parameter."""
        self._keys: set[str] = set()
        self._json: JsonCalls | None = None
        self._is_ended = False
        self.is_broken = False

    @property
    def is_whole(self) -> bool:
        if self._json is not None:
            return self._json.is_whole
        return self._is_ended and self._name is not None and not self.is_broken

    def push(self, text: str) -> list[CallPiece]:
        if self._json is not None:
            found = self._json.push(text)
            self.is_broken = self._json.is_broken
            return found
        self._text += text
        if self._name is None and self._text.lstrip()[:1] == "{":
            self._json = JsonCalls()
            return self.push(self._text)
        return self._read()

    def _read(self) -> list[CallPiece]:
        found: list[CallPiece] = []
        if self._name is None:
            match = self._tags.name.match(self._text)
            if match is None:
                return found
            self._name = match["name"].strip()
            self._text = self._text[match.end() :]
            found.append(CallPiece(self._name, ""))
        close = self._tags.close
        while self._text.find(close, self._searched) >= 0 and (match := self._tags.parameter.search(self._text)):
            key = match["key"].strip()
            if key not in self._keys:
                value = json.dumps(self._typed(self._name, key, match["value"]), ensure_ascii=False)
                found.append(CallPiece(None, f"{', ' if self._keys else '{'}{json.dumps(key)}: {value}"))
                self._keys.add(key)
            self._text, self._searched = self._text[match.end() :], 0
        self._searched = max(0, len(self._text) - len(close) + 1)
        return found

    def end(self, closed: bool) -> list[CallPiece]:
        if self._json is not None:
            return self._json.end(closed)
        found: list[CallPiece] = []
        if self._name is None:
            self._text += "\n"
            found = self._read()
        if not closed or self._name is None or self._tags.begin in self._text:  # no name, or a parameter is cut
            self.is_broken = True
            return []
        self._is_ended = True
        return [*found, CallPiece(None, "}" if self._keys else "{}")]
