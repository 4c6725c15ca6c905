"""`odmoe stores`: the expert stores in the cache of this machine, and their removal."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from odmoe.commands.shared.options import Json
from odmoe.terminal import Output
from scheduler.errors import ConfigError, StoreError, StoreWriteError
from scheduler.unknown_names import nearest

UNFINISHED = ".partial"


@dataclass(frozen=True)
class Stored:
    """A store of the cache. `format`: dtype, encoding and forms, or its fault. `last_used`: seconds since 1970."""

    name: str
    model: str
    format: str
    bytes: int
    last_used: float


def stores(
    remove: Annotated[
        str | None, typer.Option(help="Remove this store instead", show_default=False, metavar="STORE")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the expert stores in this machine's cache: model, format, size, last use.

    A store that is removed is made again when its model is used.
    """
    run_stores(remove, Output(as_json, False, False))


def run_stores(remove: str | None, output: Output) -> None:
    """List the stores of the cache, the one used last first; or remove one. Raises ConfigError, StoreWriteError."""
    from odmoe.stores import cache_dir

    folder = cache_dir() / "stores"
    there = folder.iterdir() if folder.is_dir() else ()
    names = [path.name for path in there if path.is_dir() and not path.is_symlink() and _is_store(path.name)]
    if remove is not None:
        if remove not in names:
            near = nearest(remove, names) or "; odmoe stores lists them"
            raise ConfigError(f"--remove is {remove!r}, which is no store in {folder}{near}")
        nbytes = _size(folder / remove)
        _remove(folder / remove)
        report: object = {"removed": remove, "bytes": nbytes}
        line = f"removed {remove}, {nbytes / 1e9:.2f} GB"
    else:
        found = sorted((_inspect_store(folder / name) for name in names), key=lambda one: -one.last_used)
        report = {"folder": str(folder), "stores": [asdict(one) for one in found]}
        line = _table(folder, found)
    print(json.dumps(report) if output.json else line)


def _is_store(name: str) -> bool:
    """Whole or unfinished: not the folder in which a store's small files are made again."""
    return not name.startswith(".") or name.endswith(UNFINISHED)


def _inspect_store(path: Path) -> Stored:
    """Raises nothing: a damaged store is to be listed and removed, too."""
    from checkpoint.store import ExpertStore
    from odmoe.stores import uses_dir

    model, used = "", path.stat().st_mtime
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        record = uses_dir() / path.name
        model, used = str(json.loads(record.read_text()).get("model", "")), record.stat().st_mtime
    try:
        manifest = ExpertStore.open(path).manifest
        format = ", ".join([manifest.dtype, *filter(None, [manifest.described]), *manifest.forms])
        model = model or manifest.family
    except (StoreError, OSError):
        format = "unfinished" if path.name.endswith(UNFINISHED) else "damaged"
    return Stored(path.name, model, format, _size(path), used)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())


def _remove(path: Path) -> None:
    """The manifest goes first: what is left after an interruption is no store. Raises StoreWriteError."""
    from odmoe.stores import uses_dir

    try:
        (path / "manifest.json").unlink(missing_ok=True)
        shutil.rmtree(path)
    except OSError as error:
        raise StoreWriteError(f"the store {path} cannot be removed: {error.strerror}") from error
    with contextlib.suppress(OSError):
        (uses_dir() / path.name).unlink()


def _table(folder: Path, found: list[Stored]) -> str:
    if not found:
        return f"no stores in {folder}"
    rows = [("STORE", "MODEL", "FORMAT", "GB", "LAST USE")]
    for one in found:
        day = time.strftime("%Y-%m-%d", time.localtime(one.last_used))
        rows.append((one.name, one.model, one.format, f"{one.bytes / 1e9:.2f}", day))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    total = sum(one.bytes for one in found) / 1e9
    return "\n".join([*lines, f"{total:.2f} GB in {folder}; odmoe stores --remove STORE removes one"])
