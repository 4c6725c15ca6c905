"""Finds or makes the expert store of a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoint.hub import find_model
from checkpoint.manifest import MANIFEST, OLDEST_FORMAT
from checkpoint.native.encodings import DEQUANTISED
from checkpoint.sharding.partial_store import sweep
from checkpoint.sharding.source import Source, open_source
from checkpoint.store import ExpertStore
from scheduler.errors import CorruptStoreError, StoreWriteError

if TYPE_CHECKING:
    from checkpoint.sharding.shard import Made

Progress = Callable[[str, int, int], None]
"""Task, done, total."""
ABANDONED_S = 24 * 3600.0
"""Age at which an unfinished store in the cache is removed."""


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/odmoe`, or `~/.cache/odmoe` where that is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "odmoe"


def prepare_store(
    model: str,
    store: str | None,
    dtype: str | None,
    progress: Progress | None = None,
    forms_needed: Callable[[ExpertStore], Sequence[str]] | None = None,
    check: Callable[[Source], None] | None = None,
    experts: str | None = None,
) -> ExpertStore:
    """The store of a model, whole and verified. A missing one is made, at `store` or in the cache.

    `model`: a checkpoint, or a store. `forms_needed`: the forms that this store needs beside the full one; missing ones
    are added. `check` gets a checkpoint before a store is made of it, and raises if that is not to be. `experts`: see
    `make_store`.
    Raises CheckpointError, StoreError.
    """
    path = find_model(model)
    source = None if (path / MANIFEST).is_file() and not store else open_source(path)
    cached = _cached(source, dtype, experts) if source and not store else None
    try:
        if source is None:
            from checkpoint.sharding.shard import check_same

            opened = check_same(ExpertStore.open(path), None, dtype, experts)
        else:
            target = cached or Path(os.path.expanduser(store or ""))
            made = make_or_open(source, target, dtype, progress, check, experts)
            opened = made.store
            if made.written:
                opened.trust(stamps_dir())
        opened.verify_once(stamps_dir(), progress and (lambda done, total: progress("verify", done, total)))
    except CorruptStoreError as error:
        if cached is None:
            raise
        raise CorruptStoreError(f"{error}; remove {cached}, and the next run makes it again") from error
    return opened if forms_needed is None else with_forms(opened, forms_needed(opened), progress)


def with_forms(store: ExpertStore, forms: Sequence[str], progress: Progress | None = None) -> ExpertStore:
    """A verified store with these forms. The checksums of an added form are of the bytes that were written.

    Raises ConfigError for an unknown form, CheckpointError, StoreError.
    """
    missing = [form for form in forms if form and form not in store.manifest.forms]
    if not missing:
        return store
    from checkpoint.sharding.form_files import add_forms

    found = add_forms(store, missing, progress)
    found.trust(stamps_dir())
    return found


def make_or_open(
    source: Source,
    target: Path,
    dtype: str | None,
    progress: Progress | None = None,
    check: Callable[[Source], None] | None = None,
    experts: str | None = None,
) -> Made:
    """The store at `target` of this checkpoint and dtype, made if missing. `check` and `experts`: as for
    `prepare_store`.

    Raises CheckpointError, StoreError.
    """
    from checkpoint.sharding.dense_files import add_files
    from checkpoint.sharding.shard import Made, check_same, make_store
    from odmoe.text import has_vocabulary

    if (target / MANIFEST).is_file():
        store = check_same(ExpertStore.open(target), source, dtype, experts)
        if has_vocabulary(source.path) and not has_vocabulary(store.dense):
            try:
                store = add_files(store, source)
            except OSError as error:
                raise StoreWriteError(
                    f"the tokenizer of {source.path} cannot be copied into {target}: {error.strerror}"
                ) from error
        return Made(store, False, 0)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreWriteError(
            f"the folder {target.parent} cannot be made: {error.strerror}; choose another place with --store, or with "
            "XDG_CACHE_HOME for all stores"
        ) from error
    sweep(cache_dir() / "stores", ABANDONED_S)
    return make_store(source, target, dtype, progress, check, experts)


def stamps_dir() -> Path:
    """The folder that records which stores have been verified."""
    return cache_dir() / "verified"


def _cached(source: Source, dtype: str | None, experts: str | None) -> Path:
    """The store's place in the cache. Its name is made of the checkpoint's name, dtype, sizes and times and the oldest
    format of stores, so that a checkpoint that has changed gets a new store."""
    stored_dtype = dtype or str(source.config.get("dtype") or source.config.get("torch_dtype") or source.dtype)
    name = f"{source.path.resolve().name}-{stored_dtype}-{OLDEST_FORMAT}-{source.stamp[:16]}"
    name += "-dequantised" if experts == DEQUANTISED else ""
    return cache_dir() / "stores" / name


def open_verified(path: str) -> ExpertStore:
    """This host's store at `path`, verified unless it was before and has not changed since. Raises StoreError."""
    store = ExpertStore.open(Path(path))
    store.verify_once(stamps_dir())
    return store
