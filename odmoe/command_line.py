"""The command line: every command, and how its process ends. Answers go to standard output, everything else to standard
error."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from odmoe.commands.shared.exit import ENDINGS, has_flag, one_interrupt, outcome, print_error
from odmoe.commands.shared.flags import SettingsCommand

NAMES = (
    *("generate", "chat", "pull", "models", "rm", "config", "shard"),
    *("certs", "up", "status", "down", "host-stores"),
    *("bench", "chaos", "doctor", "plan", "serve", "simulate", "routes", "systems", "train-predictor", "verify"),
)
"""Of the commands, in the order of the help. Each is the function of that name in its module of `odmoe.commands`."""


class _Commands(Mapping[str, Any]):
    """By name. A command is imported when it is asked for: it needs none of the others, nor their settings."""

    def __init__(self) -> None:
        self._imported: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in NAMES:
            raise KeyError(name)
        if name not in self._imported:
            self._imported[name] = _imported(name)
        return self._imported[name]

    def __contains__(self, name: object) -> bool:
        return name in NAMES

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


def _imported(name: str) -> Any:
    function = name.replace("-", "_")
    alone = typer.Typer()
    alone.command(name, cls=SettingsCommand)(getattr(import_module(f"odmoe.commands.{function}"), function))
    return typer.main.get_command_from_info(
        alone.registered_commands[0], pretty_exceptions_short=False, rich_markup_mode=app.rich_markup_mode
    )


class _Group(TyperGroup):
    """All commands of `odmoe`."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**{**given, "commands": _Commands()})


app = typer.Typer(
    cls=_Group,
    help="Run Mixture-of-Experts models too large for any of your machines.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(show: bool) -> None:
    if show:
        from importlib.metadata import version

        from odmoe.bundled import commit

        found = commit()
        print(f"odmoe {version('odmoe')}" + (f" ({found})" if found else ""))
        raise typer.Exit


@app.callback()
def _root(
    show: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version", metavar="")
    ] = False,
) -> None:
    """Run Mixture-of-Experts models too large for any of your machines."""


def run() -> int:
    """Run the command line. Returns the exit code."""
    # A typer.Exit gives its code, which may stand for Ctrl-C.
    return outcome(lambda: app(prog_name="odmoe", standalone_mode=False), has_flag("--json"))


def main() -> NoReturn:
    """Run the command line and end the process, without waiting for threads that are inside a library. The
    interpreter's normal exit would wait for such a thread, or abort because of it."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    one_interrupt()
    code = 1
    try:
        code = run()
    except Exception as error:  # noqa: BLE001 - a bug: show all that is known about it
        traceback.print_exc()
        if has_flag("--json"):
            print_error(type(error).__name__, str(error))
    for number in ENDINGS:
        signal.signal(number, signal.SIG_IGN)  # the process is ending already
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    atexit._run_exitfuncs()
    os._exit(code)


if __name__ == "__main__":
    main()
