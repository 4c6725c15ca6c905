"""`odmoe status`: the state of a cluster's machines and nodes."""

from __future__ import annotations

from typing import Annotated

import typer

from odmoe.commands.shared.options import File, switch


def status(
    file: File,
    watch: Annotated[bool, switch("--watch", help="Repeat until Ctrl-C")] = False,
    as_json: Annotated[bool, switch("--json", help="Print one JSON object (with --watch, one per line)")] = False,
) -> None:
    """Show the state of every machine and its node.

    The exit code is 1 unless all nodes are ready.
    """
    from odmoe.machines.status import status as show

    if not show(file, watch, as_json):
        raise typer.Exit(1)
