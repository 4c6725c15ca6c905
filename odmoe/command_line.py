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
from typing import Annotated, NoReturn

import typer

from odmoe.commands.bench import bench
from odmoe.commands.certs import certs
from odmoe.commands.config import config
from odmoe.commands.down import down
from odmoe.commands.generate import generate
from odmoe.commands.host_stores import host_stores
from odmoe.commands.plan import plan
from odmoe.commands.serve import serve
from odmoe.commands.shard import shard
from odmoe.commands.shared.exit import ENDINGS, has_flag, one_interrupt, outcome, print_error
from odmoe.commands.shared.flags import SettingsCommand
from odmoe.commands.simulate import simulate
from odmoe.commands.status import status
from odmoe.commands.stores import stores
from odmoe.commands.systems import systems
from odmoe.commands.train_predictor import train_predictor
from odmoe.commands.up import up
from odmoe.commands.verify import verify

COMMANDS = (
    *(generate, config, shard, stores),
    *(certs, up, status, down, host_stores),
    *(bench, plan, serve, simulate, systems, train_predictor, verify),
)
"""In the order of the help."""

app = typer.Typer(
    help="Run Mixture-of-Experts models too large for any of your machines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(show: bool) -> None:
    if show:
        from importlib.metadata import version

        print(f"odmoe {version('odmoe')}")
        raise typer.Exit


@app.callback()
def _root(
    show: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version", metavar="")
    ] = False,
) -> None:
    """Run Mixture-of-Experts models too large for any of your machines."""


for command in COMMANDS:
    app.command(cls=SettingsCommand)(command)


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
