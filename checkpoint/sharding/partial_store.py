"""An unfinished store: `.NAME.partial` beside its place, written by one process at a time, resumed after a crash.

.NAME.partial/
  lock       held (flock) by the writing process; touched at each progress
  journal    a line for the checkpoint, then one for each finished layer, each with its own checksum
  store/     the store to be renamed into place

A journaled layer is trusted after all of it was read back and its checksums agree. That costs a third of writing it,
and is right after a power cut or a disk fault, too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from checkpoint.direct_io import sync_directory
from checkpoint.manifest import MANIFEST, LayerSpec, layer_from, possible, possible_dense, seal
from checkpoint.store import ExpertStore, blob_fault, dense_fault
from scheduler.errors import StoreWriteError

Progress = Callable[[str, int, int], None]
IDLE_S = 60.0
_POLL_S = 0.1


def partial_of(target: Path) -> Path:
    """The folder in which the store `target` is written until it is whole."""
    return target.with_name(f".{target.name}.partial")


def begun(target: Path, identity: dict[str, Any]) -> bool:
    """Whether an earlier run from the same files was interrupted; it had checked these files."""
    lines = journal_lines(partial_of(target) / "journal")
    return bool(lines) and lines[0].get("identity") == identity


class Partial:
    """The exclusive right to write one store. Made by `claim`; `publish`, `keep` or `discard` returns it."""

    def __init__(self, target: Path, lock: int) -> None:
        self.target = target
        self.folder = partial_of(target)
        self.store = self.folder / "store"
        self.layers: dict[int, LayerSpec] = {}
        self.dense: dict[str, str] | None = None
        self._journal = self.folder / "journal"
        self._lock = lock

    @staticmethod
    def claim(target: Path, report: Progress) -> Partial | None:
        """Waits while another process that writes `target` makes progress; None if that one has finished it.

        Raises StoreWriteError after 60 s without progress, OSError.
        """
        lock = claim(partial_of(target), (target / MANIFEST).exists, f"the store {target}", report)
        return None if lock is None else Partial(target, lock)

    def beat(self) -> None:
        """Touch the lock: a sign of progress for a process that waits for it."""
        with contextlib.suppress(OSError):
            os.utime(self._lock)

    def resume(self, identity: dict[str, Any], planned: dict[int, LayerSpec], report: Progress) -> None:
        """Keep what an earlier run from the same files (`identity`) finished, and delete the rest.

        `planned` are the layouts of the layers, without checksums. Raises OSError.
        """
        lines = journal_lines(self._journal)
        if not lines or lines[0].get("identity") != identity:
            shutil.rmtree(self.store, ignore_errors=True)
            lines = []
        self.store.mkdir(exist_ok=True)
        entries = {entry["layer"]: entry["spec"] for entry in lines[1:] if "layer" in entry}
        for done, (layer, fields) in enumerate(entries.items()):
            report("resume", done, len(entries))
            spec = layer_of(fields)
            if layer in planned and spec and _alike(spec, planned[layer]) and self._agrees(layer, spec):
                self.layers[layer] = spec
        sums = next((entry["dense"] for entry in lines[1:] if "dense" in entry), None)
        if sums is not None and possible_dense(sums) and dense_fault(self.store, sums) is None:
            self.dense = sums
        kept = {spec.file for spec in self.layers.values()} | ({"dense"} if self.dense else set())
        for entry in list(self.store.iterdir()):
            if entry.name not in kept:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        again: list[dict[str, Any]] = [
            {"identity": identity},
            *({"layer": n, "spec": asdict(spec)} for n, spec in self.layers.items()),
        ]
        if self.dense:
            again.append({"dense": self.dense})
        fresh = self._journal.with_suffix(".new")
        with fresh.open("w") as stream:
            stream.writelines(json.dumps(seal(entry)) + "\n" for entry in again)
        fresh.replace(self._journal)

    def _agrees(self, layer: int, spec: LayerSpec) -> bool:
        try:
            return blob_fault(self.store, layer, spec, lambda nbytes: self.beat()) is None
        except OSError:
            return False

    def add_layer(self, layer: int, spec: LayerSpec) -> None:
        """A layer's file is whole and synced. Raises OSError."""
        self.layers[layer] = spec
        self._add({"layer": layer, "spec": asdict(spec)})

    def add_dense(self, sums: dict[str, str]) -> None:
        """The dense part is whole and synced. Raises OSError."""
        self.dense = sums
        self._add({"dense": sums})

    def _add(self, entry: dict[str, Any]) -> None:
        with self._journal.open("a") as stream:
            stream.write(json.dumps(seal(entry)) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        self.beat()

    def publish(self, manifest: str) -> None:
        """Rename the finished store into its place. Raises OSError, or StoreError if the place has no valid store."""
        with (self.store / MANIFEST).open("w") as stream:
            stream.write(manifest)
            stream.flush()
            os.fsync(stream.fileno())
        sync_directory(self.store)
        try:
            self.store.rename(self.target)  # replaces an empty directory
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            ExpertStore.open(self.target)  # another host was faster, on a file system without shared locks
        sync_directory(self.target.parent)
        self.discard()

    def keep(self) -> None:
        """Keep the finished layers for the next run."""
        os.close(self._lock)

    def discard(self) -> None:
        """Delete everything."""
        discard(self.folder)
        os.close(self._lock)


def claim(folder: Path, there: Callable[[], bool], what: str, report: Progress) -> int | None:
    """The lock of `folder`, in which `what` is written until it is `there`; None if another process has finished it.

    Waits while another process makes progress. Raises StoreWriteError after 60 s without any, OSError.
    """
    seen, since = None, time.monotonic()
    while not there():
        folder.mkdir(parents=True, exist_ok=True)
        lock = _try_lock(folder / "lock")
        if lock is not None and not there():
            return lock
        if lock is not None:
            discard(folder)
            os.close(lock)
            return None
        state = _moved(folder / "lock")
        if state != seen:
            seen, since = state, time.monotonic()
        if time.monotonic() - since > IDLE_S:
            raise StoreWriteError(
                f"another process{_owner_of(folder / 'lock')} is writing {what} and has made no progress for "
                f"{IDLE_S:.0f} s; end it and try again, or choose another place"
            )
        report("wait", 0, 1)
        time.sleep(_POLL_S)
    return None


def sweep(folder: Path, older_s: float) -> None:
    """Remove abandoned runs from `folder`: those that are unlocked and untouched for `older_s` seconds."""
    for found in folder.glob(".*.partial"):
        with contextlib.suppress(OSError):
            if time.time() - (found / "lock").stat().st_mtime < older_s:
                continue
            lock = _try_lock(found / "lock")
            if lock is not None:
                discard(found)
                os.close(lock)


def discard(folder: Path) -> None:
    """Delete the folder, its lock last: another process never finds part of a store unlocked."""
    shutil.rmtree(folder / "store", ignore_errors=True)
    for name in ("journal", "journal.new", "lock"):
        with contextlib.suppress(OSError):
            (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _try_lock(file: Path) -> int | None:
    """A locked descriptor; None if another process holds the lock or has just removed it. Raises OSError."""
    try:
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_ino == file.stat().st_ino:
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _moved(lock: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        status = lock.stat()
        return status.st_ino, status.st_mtime_ns
    return None


def _owner_of(lock: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        return f" ({int(lock.read_text())})"
    return ""


def journal_lines(journal: Path) -> list[dict[str, Any]]:
    """The journal's lines before the first incomplete or damaged one."""
    found: list[dict[str, Any]] = []
    with contextlib.suppress(OSError, ValueError, RecursionError):
        for line in journal.read_text().splitlines():
            fields = json.loads(line)
            if not isinstance(fields, dict) or seal(fields) != fields:
                break
            found.append(fields)
    return found


def layer_of(fields: Any) -> LayerSpec | None:
    """A LayerSpec from its `asdict` fields; None if they are invalid."""
    try:
        spec = layer_from(fields)
        return spec if possible(spec) else None
    except (KeyError, TypeError, AttributeError):
        return None


def _alike(spec: LayerSpec, planned: LayerSpec) -> bool:
    shapes = [(tensor.name, tensor.shape) for tensor in spec.tensors]
    places = [(blob.offset, blob.length) for blob in spec.blobs]
    return (
        (spec.module, spec.file) == (planned.module, planned.file)
        and shapes == [(tensor.name, tensor.shape) for tensor in planned.tensors]
        and places == [(blob.offset, blob.length) for blob in planned.blobs]
    )
