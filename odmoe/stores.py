"""Finds or makes the expert store of a model."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoint.hub import find_model
from checkpoint.manifest import MANIFEST, OLDEST_FORMAT, PLAIN_DENSE
from checkpoint.native.encodings import DEQUANTISED
from checkpoint.quantisation import Quantisation
from checkpoint.sharding.partial_store import sweep
from checkpoint.sharding.source import Source, open_source
from checkpoint.store import ExpertStore
from scheduler.errors import CorruptCheckpointError, CorruptStoreError, StoreMismatchError, StoreWriteError

if TYPE_CHECKING:
    from checkpoint.sharding.shard import Made
    from odmoe.settings.settings import Settings

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
    dense: str | None = None,
) -> ExpertStore:
    """The store of a model, whole and verified. A missing one is made, at `store` or in the cache.

    `model`: a checkpoint, or a store. `forms_needed`: the forms that this store needs beside the full one; missing ones
    are added. `check` gets a checkpoint before a store is made of it, and raises if that is not to be.
    `experts`, `dense`: see `make_store`.
    Raises CheckpointError, StoreError.
    """
    path = find_model(model)
    source = None if (path / MANIFEST).is_file() and not store else open_source(path)
    cached = _cache_path(source, dtype, (experts, dense), progress, check) if source and not store else None
    try:
        if source is None:
            from checkpoint.sharding.shard import check_same

            opened = check_same(ExpertStore.open(path), None, dtype, experts, dense)
        else:
            target = cached or Path(os.path.expanduser(store or ""))
            made = make_or_open(source, target, dtype, progress, check, experts, dense)
            opened = made.store
            if made.written:
                opened.trust(stamps_dir())
        check_whole(opened).verify_once(
            stamps_dir(), progress and (lambda done, total: progress("verify", done, total))
        )
    except CorruptStoreError as error:
        if cached is None:
            raise
        raise CorruptStoreError(f"{error}; remove {cached}, and the next run makes it again") from error
    _note_use(opened, model)
    return opened if forms_needed is None else with_forms(opened, forms_needed(opened), progress)


def store_of(
    settings: Settings, progress: Progress | None = None, check: Callable[[Source], None] | None = None
) -> ExpertStore:
    """The store of the settings' model, with the forms that they need. `check`: as for `prepare_store`."""
    from odmoe.clusters.configuration import forms_needed

    needed = partial(forms_needed, settings)
    return prepare_store(
        settings.model,
        settings.store,
        settings.dtype,
        progress,
        needed,
        check,
        experts=settings.experts,
        dense=settings.dense,
    )


def check_whole(store: ExpertStore) -> ExpertStore:
    """The store. Raises StoreMismatchError for a part of one."""
    if store.held is None:
        return store
    raise StoreMismatchError(
        f"{store.path} is a part of a store, with {len(store.held)} of its experts, for a worker; give the whole "
        "store, or the model that it was made of"
    )


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
    dense: str | None = None,
) -> Made:
    """The store at `target` of this checkpoint and dtype, made if missing. `check`, `experts` and `dense`: as
    for `prepare_store`.

    Raises CheckpointError, StoreError.
    """
    from checkpoint.sharding.dense_files import refresh
    from checkpoint.sharding.shard import Made, check_same, checked_plan, make_store

    if (target / MANIFEST).is_file():
        store = ExpertStore.open(target)
        if store.manifest.fingerprint != source.fingerprint:  # else a store of an earlier version
            _read_weights(source, progress)
        made = Made(check_same(store, source, dtype, experts, dense), False, 0)
    else:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreWriteError(
                f"the folder {target.parent} cannot be made: {error.strerror}; choose another place with --store, or "
                "with XDG_CACHE_HOME for all stores"
            ) from error
        sweep(cache_dir() / "stores", ABANDONED_S)
        made = make_store(source, target, dtype, progress, check, experts, dense)
        _read_weights(source, progress)  # records what `make_store` has found
    if made.store.manifest.config != source.config:  # it may need other tensors now
        checked_plan(source, made.store.manifest.dtype, check)
    try:
        return replace(made, store=refresh(made.store, source))
    except OSError as error:
        raise StoreWriteError(
            f"files of {source.path} have changed, and cannot be copied into the store {target}: {error.strerror}; "
            "make it writable, or give another --store"
        ) from error


def _read_weights(source: Source, progress: Progress | None) -> str:
    """The digest of a checkpoint's weights, which are read once. Raises CorruptCheckpointError."""
    from checkpoint.sharding.identity import weights_digest

    def step(done: int, total: int) -> None:
        if progress:
            progress("verify", done, total)

    try:
        return weights_digest(source, step, cache_dir() / "weights")
    except OSError as error:
        raise CorruptCheckpointError(f"{error.filename or source.path} cannot be read: {error.strerror}") from error


def stamps_dir() -> Path:
    """The folder that records which stores have been verified."""
    return cache_dir() / "verified"


def _cache_path(
    source: Source,
    dtype: str | None,
    kept: tuple[str | None, str | None],
    progress: Progress | None,
    check: Callable[[Source], None] | None,
) -> Path:
    """The store's place in the cache. Its name is made of what is in it: the weights, the structure of the model, the
    dtype, and how experts and dense part are `kept`. Raises CheckpointError."""
    from checkpoint.family import config_from_dict
    from checkpoint.sharding.identity import is_read, structure
    from checkpoint.sharding.shard import checked_plan, store_dtype

    (experts, _), kept_as = kept, _suffix(*kept)
    if (former := _former(source, dtype, kept_as)).is_dir():
        return former
    kind, stored = structure(source.config), store_dtype(source, dtype)
    family = config_from_dict(source.config).model_type
    if not is_read(source, cache_dir() / "weights"):
        checked_plan(source, stored, check, experts)  # reading takes minutes
    contents = hashlib.sha256(f"{kind} {_read_weights(source, progress)}".encode()).hexdigest()[:16]
    return cache_dir() / "stores" / f"{family}-{stored}-{contents}{kept_as}"


def _suffix(experts: str | None, dense: str | None) -> str:
    """How a store keeps its weights, as its name in the cache says it."""
    quantisation = Quantisation.of(experts)
    of_experts = f"-{quantisation.experts}" if quantisation else "-dequantised" if experts == DEQUANTISED else ""
    return of_experts + (f"-dense-{dense}" if dense not in (None, PLAIN_DENSE) else "")


def _former(source: Source, dtype: str | None, kept_as: str) -> Path:
    """The place that an earlier version gave the store of a checkpoint in which nothing has changed since."""
    stored = Path(dtype or str(source.config.get("dtype") or source.config.get("torch_dtype") or source.dtype)).name
    name = f"{source.path.resolve().name}-{stored}-{OLDEST_FORMAT}-{source.stamp[:16]}{kept_as}"
    return cache_dir() / "stores" / name


def _note_use(store: ExpertStore, model: str) -> None:
    """Record when a store of the cache was used, and for which model. Without write access nothing is recorded."""
    if store.path.parent != cache_dir() / "stores":
        return
    with contextlib.suppress(OSError):
        folder = uses_dir()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / store.path.name).write_text(json.dumps({"model": model, "dtype": store.manifest.dtype}))


def uses_dir() -> Path:
    """The folder that records which store was used last when, and for which model."""
    return cache_dir() / "used"


def open_verified(path: str) -> ExpertStore:
    """This host's store at `path`, verified unless it was before and has not changed since. Raises StoreError."""
    store = ExpertStore.open(Path(path))
    store.verify_once(stamps_dir())
    return store
