"""Finding or making the expert store of a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoint.manifest import FORMAT, MANIFEST
from checkpoint.sharding.partial_store import sweep
from checkpoint.sharding.source import Source, find_model, open_source
from checkpoint.store import ExpertStore
from scheduler.errors import CorruptStoreError, StoreWriteError

if TYPE_CHECKING:
    from checkpoint.sharding.shard import Made

Progress = Callable[[str, int, int], None]
ABANDONED_S = 24 * 3600.0


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/odmoe`, `~/.cache/odmoe` where that is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "odmoe"


def prepare_store(
    model: str, store: str | None, dtype: str | None, progress: Progress | None = None, forms: Sequence[str] = ()
) -> ExpertStore:
    """The store of a model, whole and verified. Made first where there is none: at `store`, or in the cache.

    A directory that is itself a store may be given as the model. `forms`: those that it shall have beside the full one,
    added where they are missing. Raises CheckpointError, StoreError.
    """
    path = find_model(model)
    source = None if (path / MANIFEST).is_file() and not store else open_source(path)
    cached = _cached(source, dtype) if source and not store else None
    try:
        if source is None:
            from checkpoint.sharding.shard import check_same

            opened = check_same(ExpertStore.open(path), None, dtype)
        else:
            made = make_or_open(source, cached or Path(os.path.expanduser(store or "")), dtype, progress)
            opened = made.store
            if made.written:
                opened.trust(stamps_dir())
        opened.verify_once(stamps_dir(), progress and (lambda done, total: progress("verify", done, total)))
    except CorruptStoreError as error:
        if cached is None:
            raise
        raise CorruptStoreError(f"{error}: remove {cached}, and it is made again by itself") from error
    return with_forms(opened, forms, progress)


def with_forms(store: ExpertStore, forms: Sequence[str], progress: Progress | None = None) -> ExpertStore:
    """A verified store with these forms. What is added has had its checksums taken from the very bytes written.

    Raises ConfigError for an unknown form, CheckpointError, StoreError.
    """
    missing = [form for form in forms if form and form not in store.manifest.forms]
    if not missing:
        return store
    from checkpoint.sharding.form_files import add_forms

    found = add_forms(store, missing, progress)
    found.trust(stamps_dir())
    return found


def make_or_open(source: Source, target: Path, dtype: str | None, progress: Progress | None = None) -> Made:
    """The store at `target`, of this checkpoint and dtype; made if missing. Raises CheckpointError, StoreError."""
    from checkpoint.sharding.shard import Made, check_same, make_store

    if (target / MANIFEST).is_file():
        return Made(check_same(ExpertStore.open(target), source, dtype), False, 0)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreWriteError(
            f"{target.parent} cannot be made ({error.strerror}); give another place: --store, or XDG_CACHE_HOME for "
            "all stores"
        ) from error
    sweep(cache_dir() / "stores", ABANDONED_S)
    return make_store(source, target, dtype, progress)


def stamps_dir() -> Path:
    """Where is recorded which stores were verified."""
    return cache_dir() / "verified"


def _cached(source: Source, dtype: str | None) -> Path:
    """Named after the checkpoint's place, sizes and times and our format: one that has changed gets a new store."""
    stored_dtype = dtype or str(source.config.get("dtype") or source.config.get("torch_dtype") or "float32")
    name = f"{source.path.resolve().name}-{stored_dtype}-{FORMAT}-{source.stamp[:16]}"
    return cache_dir() / "stores" / name


def open_verified(path: str) -> ExpertStore:
    """This host's copy of the store, read whole once and again whenever it has changed. Raises StoreError."""
    store = ExpertStore.open(Path(path))
    store.verify_once(stamps_dir())
    return store
