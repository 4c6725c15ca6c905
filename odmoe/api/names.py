"""Settings as a Python program names them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

from odmoe.settings.table import Table, flag
from scheduler.errors import ConfigError, ODMoEError
from scheduler.unknown_names import nearest

Kind = TypeVar("Kind", bound=Table)

_COMMAND = re.compile(r"(\bodmoe [a-z][^;,()]*)")
"""A command to run, whose flags are its own."""
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def table_of(table: type[Kind], given: Mapping[str, Any], what: str) -> Kind:
    """A table of settings, whose errors name them as in Python. `what`: what a name of it is. Raises ConfigError."""
    check_names(given, table.model_fields, what)
    make: Any = table
    found: Kind = make(str, **with_paths(given))
    return found


def check_names(given: Mapping[str, object], known: Mapping[str, object], what: str) -> None:
    """Raises ConfigError naming the nearest name to one that is not known."""
    for name in given:
        if name not in known:
            raise ConfigError(f"{name} is not {what}{nearest(name, list(known)) or '; allowed: ' + ', '.join(known)}")


def with_paths(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with paths as text."""
    return {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in given.items()}


def path_of(name: str, value: object, what: str) -> str:
    """The path that `name` gives, as text. `what`: of which file. Raises ConfigError for what is no path."""
    if not isinstance(value, (str, os.PathLike)) or not isinstance(path := os.fspath(value), str):
        raise ConfigError(f"{name} is {value!r}; allowed: {what}, as a text or a pathlib.Path")
    return path


@contextlib.contextmanager
def named_as_keywords() -> Iterator[None]:
    """Errors from within say `shadow`, as a Python program names the setting, in place of `--shadow`. Most of the
    project speaks to people at the command line."""
    try:
        yield
    except ODMoEError as error:
        error.args = (keywords(str(error)), *error.args[1:])
        raise


def keywords(text: str) -> str:
    """The text with keywords for the flags of settings; other flags, and those of commands, stay."""
    parts = _COMMAND.split(text)
    parts[::2] = [_FLAG.sub(lambda found: _keywords().get(found[0], found[0]), part) for part in parts[::2]]
    return "".join(parts)


@cache
def _keywords() -> dict[str, str]:
    from odmoe.settings.plan_settings import PlanSettings
    from odmoe.settings.settings import Settings
    from odmoe.settings.simulate_settings import SimulateSettings

    return {flag(name): name for table in (Settings, PlanSettings, SimulateSettings) for name in table.model_fields}
