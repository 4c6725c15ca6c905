"""`odmoe trace`: draw a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from odmoe.api.checks import check_writable
from odmoe.cli.options import Debug
from scheduler.errors import ConfigError


def add_trace(app: typer.Typer) -> None:
    """`odmoe trace`."""
    app.command()(trace)


def trace(
    file: Annotated[Path, typer.Argument(help="Trace that generate or simulate wrote with --trace")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="PNG to write (default: FILE.png)", show_default=False, metavar="PATH"),
    ] = None,
    token: Annotated[
        int | None,
        typer.Option(help="First token to draw (default: one of median duration)", show_default=False, metavar="N"),
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Number of tokens to draw (default: 1)", show_default=False, metavar="N")
    ] = 1,
    debug: Debug = False,
) -> None:
    """Draw a trace as a timeline: one row per node, time to the right.

    Token 0 is the first after the prompt. Stalls are red, late departures of the shadow are yellow.
    """
    if token is not None and token < 0:
        raise ConfigError(f"--token is {token}; allowed: 0, 1, ...")
    if tokens < 1:
        raise ConfigError(f"--tokens is {tokens}; allowed: 1, 2, ...")
    picture = output or file.with_suffix(".png")
    if picture.suffix != ".png":
        raise ConfigError(f"--output is {str(picture)!r}; allowed: a file whose name ends in .png")
    if picture.resolve() == file.resolve():
        raise ConfigError(f"--output is {str(picture)!r}, the trace itself; give the picture another name")
    check_writable("--output", str(picture))
    from odmoe.commands.trace import run_trace  # matplotlib takes half a second

    title = run_trace(file, picture, token, tokens)
    print(f"{picture}: {title}")
