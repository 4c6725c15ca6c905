"""Checks a message against the bounds of its fields, before anything is allocated for it."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from scheduler.errors import ProtocolError
from scheduler.model_limits import ModelLimits
from wire.bounds.kinds import Bound
from wire.bounds.relations import Relation, relations_of
from wire.bounds.table import fields_of
from wire.messages import Message


class _Entry(NamedTuple):
    get: Callable[[Any], tuple[Any, ...]]
    """All fields, in one call."""
    holds: tuple[Callable[[Any], bool], ...]
    fields: tuple[tuple[str, Bound], ...]
    relation: Relation | None


class Bounds:
    """The bounds of every message of one stream. Thread-safe."""

    def __init__(self, limits: ModelLimits) -> None:
        self.limits = limits
        relations = relations_of(limits)
        self._entries = {
            kind: _entry(fields, relations.get(kind)) for kind, fields in fields_of(limits).items() if fields
        }

    def check(self, message: Message) -> None:
        """Raises ProtocolError naming the field, its value and what is allowed."""
        entry = self._entries.get(type(message))
        if entry is None:
            return
        for holds, value in zip(entry.holds, entry.get(message), strict=True):
            if not holds(value):
                _blame(message, entry)
        if entry.relation is not None and (fault := entry.relation(message)):
            raise ProtocolError(f"{type(message).__name__} has {fault}")


def _entry(every: dict[str, Bound], relation: Relation | None) -> _Entry:
    """Of the fields that the codec has not bounded already."""
    fields = {name: bound for name, bound in every.items() if not bound.native}
    names = tuple(fields)
    get: Any = attrgetter(*names) if len(names) > 1 else lambda message: tuple(getattr(message, n) for n in names)
    return _Entry(get, tuple(bound.holds for bound in fields.values()), tuple(fields.items()), relation)


def _blame(message: Message, entry: _Entry) -> None:
    """Raises ProtocolError for the first field that is out of bounds."""
    for name, bound in entry.fields:
        value = getattr(message, name)
        if not bound.holds(value):
            raise ProtocolError(f"{type(message).__name__}.{name} is {_describe(value)}; allowed: {bound.allowed}")


def _describe(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"{value.dtype} of shape {tuple(value.shape)!s:.60}"
    if isinstance(value, str | bytes | tuple) and len(value) > 20:
        return f"{len(value)} long, {value[:4]!r:.60}..."
    return f"{value!r:.80}"


GENERAL = Bounds(ModelLimits())
"""What holds for every model."""
