"""Settings as a Python program names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from odmoe.settings.table import Table
from scheduler.errors import ConfigError
from scheduler.unknown_names import nearest

Kind = TypeVar("Kind", bound=Table)


def table_of(table: type[Kind], given: Mapping[str, Any], what: str) -> Kind:
    """A table of settings, whose errors name them as in Python. `what`: what a name of it is. Raises ConfigError."""
    check_names(given, table.model_fields, what)
    make: Any = table
    found: Kind = make(str, **given)
    return found


def check_names(given: Mapping[str, object], known: Mapping[str, object], what: str) -> None:
    """Raises ConfigError naming the nearest name to one that is not known."""
    for name in given:
        if name not in known:
            raise ConfigError(f"{name} is not {what}{nearest(name, list(known)) or '; allowed: ' + ', '.join(known)}")
