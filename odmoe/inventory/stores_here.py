"""The expert stores in the cache of this machine."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

from odmoe.inventory.entry import STORE, Entry, size_of_folder
from scheduler.errors import StoreError, StoreWriteError

UNFINISHED = ".partial"


def stores_dir() -> Path:
    """The folder of all stores that were made on the fly."""
    from odmoe.stores import cache_dir

    return cache_dir() / "stores"


def stores_here() -> list[Entry]:
    """Every store of the cache, the one used last first. Damaged and unfinished ones are listed, too."""
    return sorted((_inspect(stores_dir() / name) for name in store_names()), key=lambda one: -one.last_used)


def store_names() -> list[str]:
    """Whole or unfinished: not the folder in which a store's small files are made again."""
    there = stores_dir().iterdir() if stores_dir().is_dir() else ()
    found = [path for path in there if path.is_dir() and not path.is_symlink()]
    return [path.name for path in found if not path.name.startswith(".") or path.name.endswith(UNFINISHED)]


def remove_store(path: Path) -> None:
    """The manifest goes first: what is left after an interruption is no store. Raises StoreWriteError."""
    from odmoe.stores import uses_dir

    try:
        (path / "manifest.json").unlink(missing_ok=True)
        shutil.rmtree(path)
    except OSError as error:
        raise StoreWriteError(f"the store {path} cannot be removed: {error.strerror}; check its owner") from error
    with contextlib.suppress(OSError):
        (uses_dir() / path.name).unlink()


def _inspect(path: Path) -> Entry:
    from checkpoint.manifest import PLAIN_DENSE
    from checkpoint.store import ExpertStore
    from odmoe.stores import uses_dir

    model, used, family, dense = "", path.stat().st_mtime, "", ""
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        record = uses_dir() / path.name
        model, used = str(json.loads(record.read_text()).get("model", "")), record.stat().st_mtime
    try:
        manifest = ExpertStore.open(path).manifest
        format = ", ".join([manifest.dtype, *filter(None, [manifest.described]), *manifest.forms])
        family, dense = manifest.family, manifest.dense_kept if manifest.dense_kept != PLAIN_DENSE else ""
    except (StoreError, OSError):
        format = "unfinished" if path.name.endswith(UNFINISHED) else "damaged"
    return Entry(path.name, STORE, family, format, dense, size_of_folder(path), used, str(path), model)
