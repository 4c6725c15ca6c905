"""`odmoe doctor`: what is wrong with this machine, or with the hosts of a cluster, and how to cure it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from odmoe.commands.shared.options import Debug, Json, Quiet, option, switch


def doctor(
    file: Annotated[Path | None, typer.Argument(help="Cluster file: check its hosts too", show_default=False)] = None,
    model: Annotated[
        str | None, option("-m", "--model", help="Compare memory and disk with what this model needs", metavar="TEXT")
    ] = None,
    shadow: Annotated[
        str, option(help="Precision of the shadow: fp16, int8, nf4, none (default: int8)", metavar="TEXT")
    ] = "int8",
    every: Annotated[bool, switch("-v", "--verbose", help="Show what is right on the hosts, too")] = False,
    quick: Annotated[bool, switch("--quick", help="Measure no disks and links")] = False,
    deep: Annotated[bool, switch("--deep", help="Read every byte of the stores")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Check this machine, or a cluster's hosts, before anything is started.

    Each check is ok, a warning or a failure, with its cure (>). Nothing is changed.

    The exit code is 1 if something failed.
    """
    import sys

    from rich.console import Console

    from odmoe.doctor.doctor import Asked, examine
    from odmoe.doctor.text import print_report
    from odmoe.terminal import Terminal

    asked = Asked(file, model or "", shadow, not quick, deep)
    with Terminal(quiet, debug).progress("asking") as progress:
        report = examine(asked, progress)
    if as_json:
        print(report.as_json())
    else:
        print_report(report, Console(file=sys.stdout, highlight=False), every)
    if report.failed:
        raise typer.Exit(1)
