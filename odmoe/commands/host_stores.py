"""`odmoe host-stores`: the expert stores on a cluster's machines."""

from __future__ import annotations

from typing import Annotated

import typer

from odmoe.commands.shared.options import File, Json


def host_stores(
    file: File,
    remove: Annotated[
        list[str] | None,
        typer.Option(
            help="A store to remove from every machine; repeatable. One in use stays",
            show_default=False,
            metavar="NAME",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the expert stores on the machines of a cluster file, with their sizes, or remove some."""
    from odmoe.machines.host_stores import list_stores, remove_stores

    if remove:
        remove_stores(file, remove, as_json)
    else:
        list_stores(file, as_json)
