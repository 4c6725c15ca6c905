"""Finding or making the expert store of a model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from checkpoint.source import Source, find_model, open_source
from checkpoint.store import FORMAT, MANIFEST, ExpertStore
from scheduler.errors import CorruptStoreError, StoreMismatchError, StoreWriteError

Progress = Callable[[str, int, int], None]


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/odmoe`, `~/.cache/odmoe` where that is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "odmoe"


def prepare_store(model: str, store: str | None, dtype: str | None, progress: Progress | None = None) -> ExpertStore:
    """The store of a model, whole and verified. Made first where there is none: at `store`, or in the cache.

    A directory that is itself a store may be given as the model. Raises CheckpointError, StoreError.
    """
    path = find_model(model)
    source = None if (path / MANIFEST).is_file() and not store else open_source(path)
    cached = _cached(source, dtype) if source and not store else None
    try:
        if source is None:
            opened = ExpertStore.open(path)
            _check_dtype(opened, dtype)
        else:
            opened = _open_or_shard(source, cached or Path(store or "").expanduser(), dtype, progress)
        opened.verify_once(cache_dir() / "verified", progress and (lambda done, total: progress("verify", done, total)))
    except CorruptStoreError as error:
        if cached is None:
            raise
        raise CorruptStoreError(f"{error}: remove {cached}, and it is made again by itself") from error
    return opened


def _open_or_shard(source: Source, target: Path, dtype: str | None, progress: Progress | None) -> ExpertStore:
    if (target / MANIFEST).is_file():
        opened = ExpertStore.open(target)
        if opened.manifest.fingerprint != source.fingerprint:
            raise StoreMismatchError(
                f"the store at {target} belongs to another checkpoint than {source.path}; give another --store"
            )
        _check_dtype(opened, dtype)
        return opened
    from checkpoint.shard import shard

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreWriteError(
            f"{target.parent} cannot be made ({error.strerror}); give another place: --store, or XDG_CACHE_HOME for "
            "all stores"
        ) from error
    return shard(source, target, dtype, progress)


def _cached(source: Source, dtype: str | None) -> Path:
    """Named after the checkpoint's place, sizes and times and our format: one that has changed gets a new store."""
    said = dtype or str(source.config.get("dtype") or source.config.get("torch_dtype") or "float32")
    name = f"{source.path.resolve().name}-{said}-{FORMAT}-{source.stamp[:16]}"
    return cache_dir() / "stores" / name


def _check_dtype(store: ExpertStore, dtype: str | None) -> None:
    if dtype and store.manifest.dtype != dtype:
        raise StoreMismatchError(
            f"the store at {store.path} holds {store.manifest.dtype} experts, --dtype says {dtype}; "
            f"make another with: odmoe shard MODEL STORE --dtype {dtype}"
        )
