"""Flags of the command line, made from a table of settings."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand

from odmoe.settings.system_settings import SystemSettings
from odmoe.settings.table import HEADINGS, Declared, Table, declaration_of, flag
from scheduler.policies.policy_file import load_policy_file, names_from_files

_LISTED = 6
"""Most names that the help of a flag lists; of more names it lists only the first ones."""
_FILES = ("a file", "a path", "a directory")
_PLAIN = {float: "g"}

Command = Callable[..., None]


def with_settings(
    table: type[Table], only: Sequence[str] = (), beside: type[Table] | None = None, chooses: bool = True
) -> Callable[[Command], Command]:
    """Makes `command(flags, ...)` a command with a flag for every setting, or only for those of `only`, and for those
    of the table `beside`. The command receives in `flags` the settings that were given. Register it with
    `cls=SettingsCommand`.

    `chooses`: False for a command that takes od-moe unless a system is named (see `sources.effective`)."""
    names = [name for name in table.names() if not declaration_of(table, name).secret and (not only or name in only)]
    tables = {name: table if chooses or name != "system" else SystemSettings for name in names}
    settings = [parameter for name, own in tables.items() for parameter in _parameters(own, name)]
    if beside is not None:
        settings += [parameter for name in beside.names() for parameter in _parameters(beside, name)]

    def wrap(command: Command) -> Command:
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.name != "flags"
        ]
        arguments = [parameter for parameter in own if _is_argument(parameter)]
        options = [*settings, *(parameter for parameter in own if parameter not in arguments)]
        ordered = [*arguments, *sorted(options, key=_place)]

        def call(**given: Any) -> None:
            values = {parameter.name: given.pop(parameter.name) for parameter in settings}
            command(flags={name: value for name, value in values.items() if value is not None}, **given)

        call.__name__, call.__doc__ = command.__name__, command.__doc__
        call.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered}
        return call

    return wrap


def _is_argument(parameter: inspect.Parameter) -> bool:
    return any(isinstance(part, typer.models.ArgumentInfo) for part in get_args(parameter.annotation))


def _place(parameter: inspect.Parameter) -> int:
    """The rank of the heading that a flag is under; the common flags come first."""
    option: Any = next(part for part in get_args(parameter.annotation) if isinstance(part, typer.models.OptionInfo))
    return HEADINGS.index(option.rich_help_panel) if option.rich_help_panel else -1


_ALIAS = "alias_of_"


class SettingsCommand(TyperCommand):
    """A command whose hidden spellings set the same parameter as the shown one, so that the last one given wins."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if {"-h", "--help"} & {*args} and (path := _policy_file(args)):  # the settings load it, too late for the help
            load_policy_file(path)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        if any(param.name == "policy_file" for param in self.params):
            typer.echo("".join(f"{line}\n" for line in names_from_files()), nl=False)

    def make_parser(self, ctx: Any) -> Any:
        parser = super().make_parser(ctx)
        params: dict[str, Any] = {str(param.name): param for param in self.params}
        for name, hidden in params.items():
            if name.startswith(_ALIAS):
                shown = params[name.removeprefix(_ALIAS)]
                if hidden.secondary_opts:
                    parser.add_option(shown, hidden.secondary_opts, shown.name, action="store_const", const=False)
                else:
                    parser.add_option(shown, hidden.opts, shown.name)
        return parser


def _policy_file(args: list[str]) -> str | None:
    """The value of --policy-file, before anything is parsed."""
    found = os.environ.get("ODMOE_POLICY_FILE")
    for arg, following in zip(args, [*args[1:], None], strict=True):
        name, given, value = arg.partition("=")
        if name == "--policy-file":
            found = value if given else following
    return found


def _parameters(table: type[Table], name: str) -> Iterator[inspect.Parameter]:
    """The flag of a setting. A second spelling and the --no-X of a bool are hidden, since they would make the columns
    of the help wide.

    A flag that is not given is None, so that the environment and the file apply. Values are text: the table parses
    them, so a wrong value gets the same message wherever it comes from.
    """
    field, found = table.model_fields[name], declaration_of(table, name)
    truth, several = field.annotation is bool, isinstance(found.default, tuple)
    kind: Any = bool if truth else list[str] if several else str
    short = [other for other in found.flags if not other.startswith("--")]
    hidden = [f" /--no-{flag(name)[2:]}"] if truth else [other for other in found.flags if other not in short]
    shown = typer.Option(
        *short,
        flag(name),
        help=_help(found),
        show_default=False,
        metavar=_metavar(field.annotation, found),
        rich_help_panel=None if found.common else found.heading,
    )
    yield _parameter(name, kind, shown)
    if hidden:
        yield _parameter(_ALIAS + name, kind, typer.Option(*hidden, hidden=True))


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _help(found: Declared) -> str:
    """The text of a flag's help, with the allowed names, or the first of them, and the default."""
    if not found.names:
        shown = found.default not in (None, "", (), False) and "default" not in found.about
        return (
            f"{found.about} (default: {found.default:{_PLAIN.get(type(found.default), '')}})" if shown else found.about
        )
    if found.common and len(found.names) > _LISTED:
        return found.about if "default" in found.about else f"{found.about} (default: {found.default})"
    names = found.names if len(found.names) <= _LISTED else found.names[:3]
    marked = [f"{name} (default)" if name == found.default else name for name in names]
    return f"{found.about}: {', '.join(marked)}{', ... (odmoe systems)' if len(names) < len(found.names) else ''}"


def _metavar(annotation: Any, found: Declared) -> str:
    if found.metavar:
        return found.metavar
    parts = _parts(annotation)
    if bool in parts:
        return ""
    return "N" if int in parts else "X" if float in parts else "PATH" if found.allowed in _FILES else "TEXT"


def _parts(annotation: Any) -> set[Any]:
    """Every type in an annotation."""
    found = {annotation if isinstance(annotation, type) else type(annotation)}
    for part in get_args(annotation):
        found |= _parts(part)
    return found
