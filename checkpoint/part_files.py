"""Folders with a part of a store: the whole store's manifest, its files with holes for what is not there, and the list
of the experts that are (`checkpoint/held.py`).

A part has no dense files: a worker reads none of them. What was written counts once the list says so.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from checkpoint.direct_io import sync_directory, write_synced
from checkpoint.held import HELD, held_text, listed_in
from checkpoint.manifest import MANIFEST
from checkpoint.store import ExpertStore, form_manifest
from scheduler.errors import CorruptStoreError, StoreWriteError
from scheduler.types import ExpertId

_PIECE = 16 << 20


class Extent(NamedTuple):
    """Bytes of a store's file."""

    file: str
    offset: int
    length: int


def expert_sizes(store: ExpertStore) -> dict[ExpertId, int]:
    """Bytes of each expert, in all forms of the store together."""
    sizes: dict[ExpertId, int] = {}
    for form in ("", *store.manifest.forms):
        for layer, spec in store.layers(form).items():
            for expert, blob in enumerate(spec.blobs):
                key = ExpertId(layer, expert)
                sizes[key] = sizes.get(key, 0) + blob.length
    return sizes


def extents_of(store: ExpertStore, experts: Iterable[ExpertId]) -> list[Extent]:
    """Where these experts lie, in all forms, in the order of files and places; neighbours are one extent."""
    extents = []
    for form in ("", *store.manifest.forms):
        for layer, expert in experts:
            path, blob = store.locate(layer, expert, form)
            extents.append(Extent(path.name, blob.offset, blob.length))
    return _joined(sorted(extents))


def file_sizes(store: ExpertStore) -> dict[str, int]:
    """Bytes of each file of experts, holes included."""
    layers = [spec for form in ("", *store.manifest.forms) for spec in store.layers(form).values()]
    return {spec.file: max(blob.offset + blob.length for blob in spec.blobs) for spec in layers}


def manifests(store: ExpertStore) -> list[Path]:
    """The store's manifest, which makes a folder a store and is written last, and before it those of its forms."""
    return [*(form_manifest(store.path, form) for form in store.manifest.forms), store.path / MANIFEST]


def write_part(
    store: ExpertStore, target: Path, experts: frozenset[ExpertId], step: Callable[[int], None]
) -> ExpertStore:
    """Write these experts of a store to the folder `target`, or find them there. An unfinished part is written anew.

    `step` is called with the number of bytes of each piece. Raises StoreWriteError, StoreError.
    """
    if (target / MANIFEST).exists():
        return _same_part(store, target, experts, step)
    try:
        target.mkdir(parents=True, exist_ok=True)
        extents = extents_of(store, experts)
        for file, size in file_sizes(store).items():
            some = [extent for extent in extents if extent.file == file]
            _copy(store.path / file, target / file, size, some, step)
        write_synced(target / HELD, held_text(experts))
        for manifest in manifests(store):
            write_synced(target / manifest.name, manifest.read_bytes())
        sync_directory(target)
    except OSError as error:
        raise StoreWriteError(
            f"the part {target} of a store cannot be written: {error.strerror}; make room, or choose another place"
        ) from error
    return ExpertStore.open(target)


def name_held(folder: Path, experts: frozenset[ExpertId]) -> None:
    """Let the list of a part name these experts, too, in one step. `odmoe/machines/take_part.py` may add others at the
    same time: whoever writes has the folder locked, for milliseconds. Raises OSError; ValueError,
    TypeError, KeyError or AttributeError if the list is damaged."""
    where, draft = folder / HELD, folder / f".{HELD}.draft"
    place = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX)
        there = json.loads(where.read_text())
        write_synced(draft, json.dumps(there | json.loads(held_text(listed_in(there) | experts))))
        draft.replace(where)
        os.fsync(place)
    finally:
        os.close(place)


def _same_part(
    store: ExpertStore, target: Path, experts: frozenset[ExpertId], step: Callable[[int], None]
) -> ExpertStore:
    there = ExpertStore.open(target)
    if there.manifest != store.manifest or there.held != experts:
        raise StoreWriteError(
            f"{target} is another store, or another part of this one; remove it, or choose another place"
        )
    step(sum(extent.length for extent in extents_of(store, experts)))
    return there


def _copy(source: Path, target: Path, size: int, extents: list[Extent], step: Callable[[int], None]) -> None:
    with source.open("rb") as read, target.open("wb", buffering=0) as written:
        written.truncate(size)
        for _, start, length in extents:
            at = written.seek(start)
            while at < start + length:
                count = os.sendfile(written.fileno(), read.fileno(), at, min(_PIECE, start + length - at))
                if not count:
                    raise CorruptStoreError(f"{source} ends at byte {at}; make the store again")
                at += count
                step(count)
        os.fsync(written.fileno())


def _joined(extents: list[Extent]) -> list[Extent]:
    """Neighbours as one. `extents` are sorted."""
    joined: list[Extent] = []
    for extent in extents:
        last = joined[-1] if joined else None
        if last and last.file == extent.file and last.offset + last.length == extent.offset:
            joined[-1] = last._replace(length=last.length + extent.length)
        else:
            joined.append(extent)
    return joined
