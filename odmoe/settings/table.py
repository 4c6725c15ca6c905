"""Tables of settings. A setting says its type, default, bounds, help and heading once: flags, environment,
configuration files and Python callers read the same table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from scheduler.errors import ConfigError
from scheduler.unknown_names import nearest, unknown

HEADINGS = ("Model", "Workload", "Cluster", "Prediction", "Memory", "Sampling", "Output", "Experiments")
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """How one setting was declared."""

    default: Any
    allowed: str
    """What it may be, for messages."""
    about: str
    """Its help."""
    heading: str
    """Of the part of a command's help that has it."""
    common: bool = False
    """Most people need it: it comes first in the help."""
    flags: tuple[str, ...] = ()
    """Other spellings of its flag."""
    metavar: str = ""
    """What the help shows for its value, if not the type."""
    names: tuple[str, ...] = ()
    """All that it may be, where that is a list."""
    registered: bool = False
    """Its names are those of the scheduler's registry, which checks them."""
    bounds: dict[str, Any] = field(default_factory=dict)
    """As arguments of pydantic's Field."""

    def field(self) -> Any:
        return Field(self.default, json_schema_extra={"declared": self}, **self.bounds)  # type: ignore[dict-item]


def setting(
    default: Any,
    allowed: str,
    about: str,
    *flags: str,
    heading: str,
    common: bool = False,
    metavar: str = "",
    **bounds: Any,
) -> Any:
    """A field of a table; see `Declared`."""
    return Declared(
        default=default,
        allowed=allowed,
        about=about,
        heading=heading,
        common=common,
        flags=flags,
        metavar=metavar,
        bounds=bounds,
    ).field()


def count(default: int | None, about: str, *flags: str, heading: str, common: bool = False, least: int = 1) -> Any:
    """A number of things."""
    allowed = f"{least}, {least + 1}, ..."
    return setting(default, allowed, about, *flags, heading=heading, common=common, ge=least)


def one_of(default: str | None, names: Iterable[str], about: str, *, heading: str, **more: Any) -> Any:
    """One of some names; the type is str. `more`: fields of `Declared`."""
    names = tuple(names)
    return Declared(
        default=default, allowed=", ".join(names), about=about, heading=heading, names=names, **more
    ).field()


def declared(table: type[Table], name: str) -> Declared:
    """How the setting was declared."""
    extra: Any = table.model_fields[name].json_schema_extra
    found: Declared = extra["declared"]
    return found


def again(table: type[Table], name: str, **changes: Any) -> Any:
    """A setting of another table; `changes`: fields of `Declared`."""
    return replace(declared(table, name), **changes).field()


def _no_truth(value: Any) -> Any:
    """YAML's `yes` is no number."""
    if isinstance(value, bool):
        raise ValueError("a number is expected")
    return value


Count = Annotated[int, BeforeValidator(_no_truth)]
Number = Annotated[float, BeforeValidator(_no_truth)]


class Table(BaseModel):
    """Immutable settings, checked when made. Raises ConfigError naming the setting, its value and what is allowed."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, named: Callable[[str], str] | None = None, **values: Any) -> None:
        """`named`: how a setting is called in messages; by default its flag."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(type(self), error, named or flag)) from None

    @field_validator("*")
    @classmethod
    def _is_listed(cls, value: Any, info: ValidationInfo) -> Any:
        found = declared(cls, str(info.field_name))
        if found.names and not found.registered and value is not None and value not in found.names:
            raise ValueError("it is none of the names")
        return value

    @classmethod
    def names(cls) -> list[str]:
        """Every setting, in the order of the headings."""
        return sorted(cls.model_fields, key=lambda name: HEADINGS.index(declared(cls, name).heading))

    def given(self, name: str) -> bool:
        """Whether it was given, and is no default."""
        return name in self.model_fields_set


def flag(name: str) -> str:
    """`group_size` -> `--group-size`."""
    return f"--{name.replace('_', '-')}"


def shown(value: Any) -> str:
    """A value in a message: a number as it is written, though a flag's is text."""
    return value if isinstance(value, str) and _NUMBER.fullmatch(value) else repr(value)


def _explain(table: type[Table], error: ValidationError, named: Callable[[str], str]) -> str:
    """The first thing that is wrong, in one line."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        near = nearest(name.replace("_", "-"), [known.replace("_", "-") for known in table.model_fields])
        return f"{named(name)} is no setting{near or ';'} odmoe config lists them"
    found, value = declared(table, name), first["input"]
    if found.names:
        return unknown(named(name), value, found.names, "odmoe systems")
    text = "not fit to be shown" if name == "secret" else shown(value)
    return f"{named(name)} is {text}; allowed: {found.allowed}"
