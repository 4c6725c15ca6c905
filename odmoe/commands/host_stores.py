"""`odmoe host-stores`: the expert stores on a cluster's machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from odmoe.commands.shared.options import File, Json, option
from scheduler.errors import ConfigError


def host_stores(
    file: File,
    remove: Annotated[
        list[str] | None,
        option(help="A store to remove from every machine; repeatable. One in use stays", metavar="NAME"),
    ] = None,
    restore: Annotated[
        Path | None,
        option(
            help="A store here whose experts are copied to workers' machines until as many have each as the file's "
            "replicas says. What runs goes on",
            metavar="STORE",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the expert stores on the machines of a cluster file, with their sizes; remove some, or restore parts."""
    from odmoe.machines.host_stores import list_stores, remove_stores

    if remove and restore:
        raise ConfigError("--remove and --restore are both given; give one of them")
    if restore:
        from odmoe.machines.restore_parts import restore_parts
        from odmoe.terminal import Terminal

        restore_parts(file, restore, Terminal(quiet=as_json), as_json)
    elif remove:
        remove_stores(file, remove, as_json)
    else:
        list_stores(file, as_json)
