"""The fields of a request's body: those that are read, those that ask for nothing, those that nobody knows."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from odmoe.serve.api_error import ApiError
from scheduler.one_line import one_line
from scheduler.unknown_names import nearest

Value = TypeVar("Value")
MOST_NAMES = 256
"""Unknown fields that the log names, each once."""
FEW_STRANGERS = 8
"""Unknown fields of an object of which a request's errors or the log tell."""
MOST_NAME = 100
"""Characters of a field's name that are repeated to a client or in the log."""
KINDS = {str: "text", int: "an integer", float: "a number", bool: "true or false", list: "a list", dict: "an object"}


class UnknownFields:
    """Fields that are not known here are ignored and named in the log, each once, or refused. Thread-safe."""

    def __init__(self, strict: bool, log: Callable[[str], None]) -> None:
        """`strict`: they are refused. `log`: gets a line."""
        self.strict, self._log = strict, log
        self._lock = threading.Lock()
        self._named: set[str] = set()

    def on_unknown(self, name: str, known: Iterable[str] = ()) -> None:
        """`name`: with the path to it, such as `messages.refused`. Raises ApiError if they are refused."""
        name = name[:MOST_NAME]
        if not self.strict and (name in self._named or len(self._named) >= MOST_NAMES):
            return  # before what takes time
        near = nearest(name, list(known))
        if self.strict:
            text = f"{name} is not a parameter that is known here{near}{' Or' if near else ';'} leave it out"
            raise ApiError(400, text, param=name, code="unknown_parameter")
        with self._lock:
            if name in self._named or len(self._named) >= MOST_NAMES:
                return
            self._named.add(name)
        self._log(
            f"requests have the field {one_line(name)}, which is not known and has no effect{near or ';'} "
            "odmoe serve --strict refuses such (said once)"
        )


class Body:
    """The fields of a request in another API's form. Each is taken once; `end` tells what is left."""

    def __init__(self, given: Mapping[str, Any], place: str = "") -> None:
        """`place`: the path to it within the request, for messages. A field that is null counts as not given."""
        self._place = f"{place}." if place else ""
        self.left = {name: value for name, value in given.items() if value is not None}
        """What was not taken."""
        self._known: list[str] = []

    def name_of(self, name: str) -> str:
        """With the path to it."""
        return f"{self._place}{name}"

    def take(self, name: str, kind: type[Value], default: Value) -> Value:
        """Raises ApiError for a value of another kind."""
        found = self.take_any(name)
        if found is None:
            return default
        is_number = kind is float and type(found) is int
        if not (is_number or (isinstance(found, kind) and not (kind in (int, float) and isinstance(found, bool)))):
            raise self.invalid(name, f"is not {KINDS.get(kind, kind.__name__)}")
        return found  # type: ignore[no-any-return]

    def need(self, name: str, kind: type[Value]) -> Value:
        """Raises ApiError if it is missing."""
        if name not in self.left:
            place = self.name_of(name)
            raise ApiError(400, f"{place} is missing", param=place, code="missing_required_parameter")
        return self.take(name, kind, kind())

    def take_any(self, name: str) -> Any:
        """None: not given."""
        self._known.append(name)
        return self.left.pop(name, None)

    def take_text(self, name: str, kinds: Sequence[str] = ("text",)) -> str:
        """Of a field that is a text, or a list of parts of these kinds. Raises ApiError for others."""
        given = self.take_any(name)
        if given is None or isinstance(given, str):
            return given or ""
        if not isinstance(given, list):
            raise self.invalid(name, "is neither a text nor a list of parts of text")
        texts = []
        for place, part in objects_in(given, self.name_of(name)):
            kind = part.get("type")
            text = part.get("refusal" if kind == "refusal" else "text")
            if kind not in kinds or not isinstance(text, str):
                raise unsupported(place, f"has type {kind!r}; allowed: {', '.join(kinds)}")
            texts.append(text)
        return "\n".join(texts)

    def skip(self, *names: str) -> None:
        """Fields that change no answer."""
        for name in names:
            self.take_any(name)

    def refuse(self, neutral: Mapping[str, Sequence[Any]]) -> None:
        """Raises ApiError if one of these fields has a value other than those that ask for nothing."""
        for name, values in neutral.items():
            value = self.take_any(name)
            if value is not None and value not in values:
                raise self.unsupported(name, "is not supported; leave it out")

    def end(self, fields: UnknownFields) -> None:
        """What is left is not known. Raises ApiError if that is refused."""
        for name in itertools.islice(self.left, FEW_STRANGERS):
            fields.on_unknown(self.name_of(name), self._known)

    def invalid(self, name: str, why: str) -> ApiError:
        place = self.name_of(name)
        return ApiError(400, f"{place} {why}", param=place, code="invalid_value")

    def unsupported(self, name: str, why: str) -> ApiError:
        return unsupported(self.name_of(name), why)


def unsupported(place: str, why: str) -> ApiError:
    """Of what is known and cannot be followed. `place`: the path to it."""
    return ApiError(400, f"{place} {why}", param=place, code="unsupported_parameter")


def objects_in(given: list[Any], place: str) -> list[tuple[str, dict[str, Any]]]:
    """(path, item) of each. Raises ApiError for an item that is no object."""
    for number, item in enumerate(given):
        if not isinstance(item, dict):
            text = f"{place}.{number} is not an object"
            raise ApiError(400, text, param=f"{place}.{number}", code="invalid_value")
    return [(f"{place}.{number}", item) for number, item in enumerate(given)]
