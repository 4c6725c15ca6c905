"""`odmoe stores`: the former name of what `odmoe models` and `odmoe rm` do, without checkpoints."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from odmoe.commands.shared.options import Json
from odmoe.inventory.entry import Entry, size_of_folder
from odmoe.inventory.stores_here import remove_store, store_names, stores_dir, stores_here
from scheduler.errors import ConfigError
from scheduler.unknown_names import nearest


def stores(
    remove: Annotated[
        str | None, typer.Option(help="Remove this store instead", show_default=False, metavar="STORE")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the expert stores in this machine's cache: model, format, size, last use.

    odmoe models lists checkpoints, too, and odmoe rm removes either.
    """
    folder = stores_dir()
    if remove is not None:
        nbytes = _remove(remove)
        report: dict[str, Any] = {"removed": remove, "bytes": nbytes}
        line = f"removed {remove}, {nbytes / 1e9:.2f} GB"
    else:
        found = stores_here()
        report = {"folder": str(folder), "stores": [_facts(one) for one in found]}
        line = _table(found)
    print(json.dumps(report) if as_json else line)


def _remove(name: str) -> int:
    """Returns its bytes. Raises ConfigError, StoreWriteError."""
    names = store_names()
    if name not in names:
        near = nearest(name, names) or "; odmoe stores lists them"
        raise ConfigError(f"--remove is {name!r}, which is no store in {stores_dir()}{near}")
    nbytes = size_of_folder(stores_dir() / name)
    remove_store(stores_dir() / name)
    return nbytes


def _facts(one: Entry) -> dict[str, Any]:
    model = one.model or one.family
    return {"name": one.name, "model": model, "format": one.format, "bytes": one.bytes, "last_used": one.last_used}


def _table(found: list[Entry]) -> str:
    folder = stores_dir()
    if not found:
        return f"no stores in {folder}"
    rows = [("STORE", "MODEL", "FORMAT", "GB", "LAST USE")]
    for one in found:
        day = time.strftime("%Y-%m-%d", time.localtime(one.last_used))
        rows.append((one.name, one.model or one.family, one.format, f"{one.bytes / 1e9:.2f}", day))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    total = sum(one.bytes for one in found) / 1e9
    return "\n".join([*lines, f"{total:.2f} GB in {folder}; odmoe stores --remove STORE removes one"])
