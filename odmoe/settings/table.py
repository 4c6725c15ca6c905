"""Tables of settings. Each setting is declared once, with its type, default, bounds, help and heading. Flags,
environment, configuration files and Python callers use the same table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from scheduler.errors import ConfigError
from scheduler.limits import MAX_COUNT
from scheduler.unknown_names import nearest, unknown

HEADINGS = (
    "Model",
    "Workload",
    "Service",
    "Cluster",
    "Prediction",
    "Memory",
    "Sampling",
    "Output",
    "Sweep",
    "Experiments",
)
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")


Fixed = Literal["never", "running", "up"]
_BOUNDS = frozenset({"ge", "gt", "le", "lt", "min_length", "repr"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """How one setting was declared. Everything that follows from it is a field: flags, keywords, where it is sent."""

    default: Any
    allowed: str
    """The allowed values, for messages."""
    about: str
    """The text of the help."""
    heading: str
    """The heading in a command's help that the flag is under."""
    common: bool = False
    """Whether most people need it. Common flags come first in the help."""
    flags: tuple[str, ...] = ()
    """Other spellings of its flag."""
    metavar: str = ""
    """The placeholder of the value in the help, if not that of the type."""
    names: tuple[str, ...] = ()
    """All allowed names, for a setting that is one of a list."""
    registered: bool = False
    """Whether the names come from the scheduler's registry, which then checks them."""
    bounds: dict[str, Any] = field(default_factory=dict)
    """The bounds, as arguments of pydantic's Field."""
    fixed: Fixed = "never"
    """`running`: the nodes keep the value until they end, so another one cannot be asked of them. `up`: likewise for
    `odmoe up`; a command that uses running nodes may have a value of its own."""
    from_cluster: bool = False
    """Whether a value that is not given is that of the running cluster, or of the store."""
    serve: bool = True
    """Whether `odmoe serve` has a flag for it. A request says itself how one answer is made."""
    verify: bool = False
    """Whether `odmoe verify` has a flag for it: it could change an answer, or the way it is computed."""
    keyword: bool = True
    """Whether it is a keyword of the Python function that takes the table."""
    here_only: bool = False
    """Whether the value is valid on this machine only. It is not sent to a cluster's main host."""
    lasting_only: bool = False
    """Whether it applies only if the nodes outlive the command."""
    output_file: bool = False
    """Whether a command writes the file that it names."""
    secret: bool = False
    """Whether nobody may see the value. It has no flag: a process list shows flags to everyone on the machine."""

    def field(self) -> Any:
        return Field(self.default, json_schema_extra={"declared": self}, **self.bounds)  # type: ignore[dict-item]


def setting(
    default: Any,
    allowed: str,
    about: str,
    *flags: str,
    heading: str,
    **more: Any,
) -> Any:
    """Declare a field of a table. `more`: fields of `Declared`, and bounds as arguments of pydantic's Field."""
    bounds = {name: more.pop(name) for name in _BOUNDS & more.keys()}
    return Declared(
        default=default, allowed=allowed, about=about, heading=heading, flags=flags, bounds=bounds, **more
    ).field()


def count(
    default: int | None,
    about: str,
    *flags: str,
    heading: str,
    least: int = 1,
    most: int = MAX_COUNT,
    **more: Any,
) -> Any:
    """Declare an integer from `least` to `most`. `more`: fields of `Declared`."""
    allowed = f"{least}, {least + 1}, ... {most}"
    return setting(default, allowed, about, *flags, heading=heading, ge=least, le=most, **more)


def one_of(default: str | None, names: Iterable[str], about: str, *, heading: str, **more: Any) -> Any:
    """Declare one of some names, of type str. `more`: fields of `Declared`."""
    names = tuple(names)
    return Declared(
        default=default, allowed=", ".join(names), about=about, heading=heading, names=names, **more
    ).field()


def declaration_of(table: type[Table], name: str) -> Declared:
    """The declaration of a setting."""
    extra: Any = table.model_fields[name].json_schema_extra
    found: Declared = extra["declared"]
    return found


def again(table: type[Table], name: str, **changes: Any) -> Any:
    """Declare a setting of another table again, with `changes` to the fields of its `Declared`."""
    return replace(declaration_of(table, name), **changes).field()


def _reject_bool(value: Any) -> Any:
    """Reject a bool, such as YAML's `yes`, where a number is expected."""
    if isinstance(value, bool):
        raise ValueError("a number is expected")
    return value


Count = Annotated[int, BeforeValidator(_reject_bool)]
Number = Annotated[float, BeforeValidator(_reject_bool)]


class Table(BaseModel):
    """Immutable settings, checked when made. Raises ConfigError naming the setting, its value and what is allowed."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, named: Callable[[str], str] | None = None, **values: Any) -> None:
        """`named`: gives the name of a setting in messages; by default its flag."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(type(self), error, named or flag)) from None

    @field_validator("*")
    @classmethod
    def _is_listed(cls, value: Any, info: ValidationInfo) -> Any:
        found = declaration_of(cls, str(info.field_name))
        if found.names and not found.registered and value is not None and value not in found.names:
            raise ValueError("not one of the allowed names")
        return value

    @classmethod
    def names(cls) -> list[str]:
        """The names of all settings, in the order of the headings."""
        return sorted(cls.model_fields, key=lambda name: HEADINGS.index(declaration_of(cls, name).heading))

    @classmethod
    def names_with(cls, holds: Callable[[Declared], bool]) -> tuple[str, ...]:
        """The settings of whose declaration this holds; those that most people need come first."""
        names = [name for name in cls.model_fields if holds(declaration_of(cls, name))]
        return tuple(sorted(names, key=lambda name: not declaration_of(cls, name).common))

    def is_given(self, name: str) -> bool:
        """Whether the setting was given, rather than a default."""
        return name in self.model_fields_set


def flag(name: str) -> str:
    """`group_size` -> `--group-size`."""
    return f"--{name.replace('_', '-')}"


def value_text(value: Any) -> str:
    """A value as it is shown in a message: numbers without quotes, also where a flag gave them as text."""
    return value if isinstance(value, str) and _NUMBER.fullmatch(value) else repr(value)


def _explain(table: type[Table], error: ValidationError, named: Callable[[str], str]) -> str:
    """The first error, in one line."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        near = nearest(name.replace("_", "-"), [known.replace("_", "-") for known in table.model_fields])
        return f"{named(name)} is not a setting{near or ';'} odmoe config lists all settings"
    found, value = declaration_of(table, name), first["input"]
    if found.names:
        return unknown(named(name), value, found.names, "odmoe systems")
    text = "not valid (the value is not shown)" if found.secret else value_text(value)
    return f"{named(name)} is {text}; allowed: {found.allowed}"
