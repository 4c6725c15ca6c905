"""Settings as flags of the command line, made from the table in `odmoe.settings.settings`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_args

import typer

from odmoe.settings.settings import Settings, about, flag

NOT_FLAGS = frozenset({"secret"})
"""What a process list would show to everyone on the machine."""


def with_settings(command: Callable[..., None], only: Sequence[str] = ()) -> Callable[..., None]:
    """`command(flags, ...)` as a command with a flag for every setting, or `only` for some. `flags` holds those that
    were given."""
    declared = inspect.signature(command, eval_str=True).parameters.values()
    own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in declared if p.name != "flags"]
    names = [name for name in only or Settings.model_fields if name not in NOT_FLAGS]
    parameters = [_parameter(name) for name in names]
    ordered = [*(p for p in own if _is_argument(p)), *parameters, *(p for p in own if not _is_argument(p))]

    def call(**given: Any) -> None:
        flags = {name: given.pop(name) for name in names}
        command(flags={name: value for name, value in flags.items() if value is not None}, **given)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in ordered}
    return call


def _is_argument(parameter: inspect.Parameter) -> bool:
    return any(isinstance(part, typer.models.ArgumentInfo) for part in get_args(parameter.annotation))


def _parameter(name: str) -> inspect.Parameter:
    """Every flag is None when it is not given, so that the environment and the file can be asked. Values are text:
    `Settings` reads them, and says what is wrong in the same words wherever they were said."""
    field, more = Settings.model_fields[name], about(name)
    default = field.default
    text = str(field.description).rstrip(".")
    if more["listed"]:
        text += f": {more['allowed']}"
    if default not in (None, "", (), False):
        text += f" (default: {default})"
    flag_names = f"{flag(name)}/--no-{flag(name)[2:]}" if field.annotation is bool else flag(name)
    kind: Any = bool if field.annotation is bool else list[str] if name == "stop" else str
    option = typer.Option(*more["flags"], flag_names, help=text, show_default=False, metavar=_metavar(field.annotation))
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _parts(annotation: Any) -> set[Any]:
    """Every type in an annotation, and those of the values of a Literal."""
    found = {annotation if isinstance(annotation, type) else type(annotation)}
    for part in get_args(annotation):
        found |= _parts(part)
    return found


def _metavar(annotation: Any) -> str | None:
    parts = _parts(annotation)
    return None if bool in parts else "N" if int in parts else "X" if float in parts else "TEXT"
