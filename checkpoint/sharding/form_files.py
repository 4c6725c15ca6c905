"""Adds forms to an existing store: a file a layer, then the manifest that makes the form part of it.

STORE/.int4.partial/
  lock                     held (flock) by the writing process
  journal                  a line for the store and the layout, then one for each finished layer
  layer-00000.int4         moved beside the experts' own when all layers are finished

Until the manifest `int4.json` exists the store is unchanged. An interrupted run is resumed, since quantising takes
a minute for a few gigabytes. Its finished layers are read back and compared first.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from checkpoint.direct_io import open_direct, read_at, sync_directory, write_at, write_synced
from checkpoint.forms import FORMS, GROUP, planned_form, quantise
from checkpoint.manifest import FORM_FORMAT, Form, LayerSpec, checksum, seal
from checkpoint.native.parameters import ExpertParameters, restoring_bytes
from checkpoint.sharding.layers import one_thread
from checkpoint.sharding.partial_store import Progress, claim, discard, journal_lines, layer_of
from checkpoint.store import ExpertStore, blob_fault, form_manifest, same_places
from checkpoint.tensors import aligned_buffer
from scheduler.errors import ConfigError, CorruptStoreError, StoreWriteError

THREADS = 16
"""The most experts quantised at a time. Beyond about ten threads Python's lock leaves no more to gain."""

MEMORY_SHARE = 0.25
"""The most of the machine's memory that experts being quantised take, each `_memory_of` it."""


def add_forms(store: ExpertStore, forms: Sequence[str], progress: Progress | None = None) -> ExpertStore:
    """The store with these forms; missing ones are written. The empty name, the full form, is skipped.

    `progress(form, experts done, of)`. Raises ConfigError for an unknown form, StoreWriteError, CorruptStoreError for
    an expert whose own bytes are damaged, CheckpointError for one that cannot be quantised.
    """
    new_forms = [form for form in dict.fromkeys(forms) if form]
    for form in new_forms:
        if form not in FORMS:
            raise ConfigError(f"form {form!r} is unknown; allowed: {', '.join(FORMS)}")
    missing = [form for form in new_forms if form not in store.manifest.forms]
    for form in missing:
        _add(store, form, progress or (lambda what, done, total: None))
    return ExpertStore.open(store.path) if missing else store


def _add(store: ExpertStore, form: str, report: Progress) -> None:
    folder = store.path / f".{form}.partial"
    try:
        lock = claim(folder, form_manifest(store.path, form).exists, f"{form} of the store {store.path}", report)
        if lock is None:
            return
        try:
            with one_thread(), ThreadPoolExecutor(_threads(store), "odmoe-quantise") as pool:
                layers = _Layers(store, form, folder, lock, report, pool).written()
            _publish(store, form, folder, layers)
            discard(folder)
        finally:
            os.close(lock)
    except OSError as error:
        why = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))
        raise StoreWriteError(
            f"cannot add {form} to the store {store.path}: {why}; what is finished is kept in {folder}: run the same "
            "again, or remove that"
        ) from error


def _threads(store: ExpertStore) -> int:
    """One a core, as far as memory suffices for an expert in each."""
    room = MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), THREADS, int(room / _memory_of(store))))


def _memory_of(store: ExpertStore) -> int:
    """Bytes that quantising one expert takes: the expert, its form, the largest weight in float32 and as numbers."""
    manifest = store.manifest
    layers = [manifest.restored_layout(layer) for layer in manifest.layers]
    largest = max((math.prod(s.shape) for layer in layers for s in layer.tensors), default=0)
    return 2 * manifest.restored_bytes + 5 * largest + restoring_bytes(manifest, ("",), "cpu", 1)


class _Layers:
    """The layers of one form, some of them from an earlier run. `pool` quantises, an expert in each thread."""

    def __init__(
        self, store: ExpertStore, form: str, folder: Path, lock: int, report: Progress, pool: ThreadPoolExecutor
    ) -> None:
        self._pool = pool
        self._store, self._form, self._folder, self._lock = store, form, folder, lock
        self._report = report
        self._journal = folder / "journal"
        manifest = store.manifest
        self._planned = {number: planned_form(manifest.restored_layout(number), form) for number in manifest.layers}
        self._total = sum(blob.length for layer in self._planned.values() for blob in layer.blobs)
        self._done = 0
        self._found: dict[int, LayerSpec] = {}

    def written(self) -> dict[int, LayerSpec]:
        """Write the missing layers. Returns all, whole and synced. Raises OSError, ODMoEError."""
        manifest = self._store.manifest
        identity = {
            "format": FORM_FORMAT,
            "form": self._form,
            "group": GROUP,
            "fingerprint": manifest.fingerprint,
            "dtype": manifest.dtype,
        }
        lines = journal_lines(self._journal)
        if lines and lines[0].get("identity") == identity:
            for line in lines[1:]:
                self._take_up(line)
        self._journal.unlink(missing_ok=True)  # its end may be torn
        self._note({"identity": identity})
        for number, layer in self._found.items():
            self._note({"layer": number, "spec": asdict(layer)})
        self._check_room()
        for number in self._planned:
            if number not in self._found:
                self._found[number] = self._write(number)
                self._note({"layer": number, "spec": asdict(self._found[number])})
        return {number: self._found[number] for number in self._planned}

    def _take_up(self, line: dict[str, Any]) -> None:
        number, layer = line.get("layer"), layer_of(line.get("spec"))
        if number not in self._planned or layer is None or not same_places(layer, self._planned[number]):
            return
        for folder in (self._folder, self._store.path):  # an earlier run may have stopped while it moved them
            with contextlib.suppress(OSError):
                if blob_fault(folder, number, layer, lambda nbytes: self._beat(0)) is None:
                    self._found[number] = layer
                    self._done += sum(blob.length for blob in layer.blobs)
                    return

    def _check_room(self) -> None:
        missing = [layer for number, layer in self._planned.items() if number not in self._found]
        needed = sum(blob.length for layer in missing for blob in layer.blobs)
        status = os.statvfs(self._store.path)
        free = status.f_bavail * status.f_frsize
        if needed > free:
            raise StoreWriteError(
                f"{self._form} of the store {self._store.path} needs {needed:,} bytes more, {free:,} are free there; "
                "make room"
            )

    def _write(self, number: int) -> LayerSpec:
        full, planned = self._store.manifest.layers[number], self._planned[number]
        source = open_direct(self._store.path / full.file, os.O_RDONLY)
        try:
            target = open_direct(self._folder / planned.file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                blobs = []
                made = self._pool.map(lambda expert: self._blob(source, number, expert), range(len(planned.blobs)))
                for place, blob in zip(planned.blobs, made, strict=True):
                    write_at(target, place.offset, blob)
                    blobs.append(replace(place, checksum=checksum(blob.numpy().data)))
                    self._beat(place.length)
                os.fsync(target)
            finally:
                os.close(target)
        finally:
            os.close(source)
        return replace(planned, blobs=tuple(blobs))

    def _blob(self, source: int, number: int, expert: int) -> torch.Tensor:
        manifest = self._store.manifest
        layer = manifest.layers[number]
        blob = _expert(source, layer, number, expert, aligned_buffer(layer.blob_bytes))
        parameters = ExpertParameters(manifest, threads=1).of(blob, number)  # experts are made concurrently
        return quantise(parameters, manifest.restored_layout(number), self._form)

    def _note(self, entry: dict[str, Any]) -> None:
        with self._journal.open("a") as stream:
            stream.write(json.dumps(seal(entry)) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def _beat(self, nbytes: int) -> None:
        """Report progress, and touch the lock for a process that waits for it."""
        self._done += nbytes
        with contextlib.suppress(OSError):
            os.utime(self._lock)
        self._report(self._form, self._done, self._total)


def _expert(source: int, layer: LayerSpec, number: int, expert: int, buffer: torch.Tensor) -> torch.Tensor:
    blob = layer.blobs[expert]
    data = read_at(source, blob.offset, blob.length, buffer)
    if len(data) != blob.length or checksum(data.numpy().data) != blob.checksum:
        raise CorruptStoreError(
            f"expert {expert} of layer {number} in {layer.file} fails its checksum; make the store again with "
            "odmoe shard"
        )
    return data


def _publish(store: ExpertStore, form: str, folder: Path, layers: dict[int, LayerSpec]) -> None:
    """Make the form part of the store. Raises OSError."""
    for layer in layers.values():
        with contextlib.suppress(FileNotFoundError):  # an earlier run has moved it
            (folder / layer.file).replace(store.path / layer.file)
    manifest = store.manifest
    form_spec = Form(FORM_FORMAT, form, manifest.fingerprint, manifest.dtype, FORMS[form], GROUP, layers)
    fresh = folder / "manifest"
    write_synced(fresh, form_spec.to_json())
    sync_directory(store.path)
    fresh.replace(form_manifest(store.path, form))
    sync_directory(store.path)
