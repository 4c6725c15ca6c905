"""An unfinished store: `.NAME.partial` beside its place, written by one process at a time, resumed after a crash.

.NAME.partial/
  lock       held (flock) by the process that writes; touched whenever it makes progress
  journal    a line for the checkpoint, then one per finished layer, each with its own checksum
  store/     will be renamed into place

A journaled layer is trusted after every byte of it has been read back and its checksums agree. That costs a third of
writing it, and also finds what a power cut or a disk fault has damaged.
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

from checkpoint.direct_io import sync_directory, write_synced
from checkpoint.manifest import MANIFEST, LayerSpec, layer_from, possible, possible_dense, seal
from checkpoint.store import ExpertStore, blob_fault, dense_fault
from scheduler.errors import StoreWriteError

Progress = Callable[[str, int, int], None]
IDLE_S = 60.0
"""Others stop waiting for a process that has made no progress for so long."""
_POLL_S = 0.1


def partial_of(target: Path) -> Path:
    """The folder in which the store `target` is written until it is complete."""
    return target.with_name(f".{target.name}.partial")


def begun(target: Path, identity: dict[str, Any]) -> bool:
    """Has an earlier run from the very same files begun? It had verified them."""
    lines = journal_lines(partial_of(target) / "journal")
    return bool(lines) and lines[0].get("identity") == identity


class Partial:
    """The lock on an unfinished store, and its journal. Made by `claim`, released by `publish`, `keep` or `discard`."""

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
        """None if another process has made `target` meanwhile. Raises as the function `claim`."""
        lock = claim(partial_of(target), (target / MANIFEST).exists, f"the store {target}", report)
        return None if lock is None else Partial(target, lock)

    def beat(self) -> None:
        """Show progress to a process that waits for the lock."""
        with contextlib.suppress(OSError):
            os.utime(self._lock)

    def resume(self, identity: dict[str, Any], planned: dict[int, LayerSpec], report: Progress) -> None:
        """Keep what a run from the very same files (`identity`) finished, and drop all else.

        `planned`: each layer's spec, without its checksums. Raises OSError.
        """
        lines = journal_lines(self._journal)
        if not lines or lines[0].get("identity") != identity:
            shutil.rmtree(self.store, ignore_errors=True)
            lines = []
        self.store.mkdir(exist_ok=True)
        self.layers = self._whole_layers(lines[1:], planned, report)
        self.dense = self._whole_dense(lines[1:])
        self._drop_other_files()
        self._rewrite_journal(identity)

    def _whole_layers(
        self, lines: list[dict[str, Any]], planned: dict[int, LayerSpec], report: Progress
    ) -> dict[int, LayerSpec]:
        """The journal's layers that fit the plan and whose bytes agree with their checksums."""
        entries = {line["layer"]: line["spec"] for line in lines if "layer" in line}
        whole: dict[int, LayerSpec] = {}
        for done, (layer, fields) in enumerate(entries.items()):
            report("resume", done, len(entries))
            spec = layer_of(fields)
            if layer in planned and spec and _same_layout(spec, planned[layer]) and self._agrees(layer, spec):
                whole[layer] = spec
        return whole

    def _agrees(self, layer: int, spec: LayerSpec) -> bool:
        try:
            return blob_fault(self.store, layer, spec, lambda nbytes: self.beat()) is None
        except OSError:
            return False

    def _whole_dense(self, lines: list[dict[str, Any]]) -> dict[str, str] | None:
        """The dense part's checksums, if the journal has them and its files agree."""
        sums = next((line["dense"] for line in lines if "dense" in line), None)
        whole = sums is not None and possible_dense(sums) and dense_fault(self.store, sums) is None
        return sums if whole else None

    def _drop_other_files(self) -> None:
        """Remove all but the files of the layers and the dense part that are kept. Raises OSError."""
        kept = {spec.file for spec in self.layers.values()} | ({"dense"} if self.dense else set())
        for entry in list(self.store.iterdir()):
            if entry.name in kept:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def _rewrite_journal(self, identity: dict[str, Any]) -> None:
        """Raises OSError."""
        lines: list[dict[str, Any]] = [{"identity": identity}]
        lines += [{"layer": layer, "spec": asdict(spec)} for layer, spec in self.layers.items()]
        if self.dense:
            lines.append({"dense": self.dense})
        fresh = self._journal.with_suffix(".new")
        with fresh.open("w") as stream:
            stream.writelines(json.dumps(seal(line)) + "\n" for line in lines)
        fresh.replace(self._journal)

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
        """Rename the complete store into its place. Raises OSError, or StoreError if something else is there."""
        write_synced(self.store / MANIFEST, manifest)
        sync_directory(self.store)
        try:
            self.store.rename(self.target)  # takes the place of an empty directory
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            ExpertStore.open(self.target)  # a file system whose locks do not reach other machines
        sync_directory(self.target.parent)
        self.discard()

    def keep(self) -> None:
        """Keep the finished layers for the next run."""
        os.close(self._lock)

    def discard(self) -> None:
        """Remove everything."""
        discard(self.folder)
        os.close(self._lock)


def claim(folder: Path, there: Callable[[], bool], what: str, report: Progress) -> int | None:
    """The lock of `folder`, in which `what` is written until it is `there`. None if another process has made it.

    Waits for a process that holds the lock. Raises StoreWriteError if that one makes no progress for `IDLE_S`, OSError.
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
        state = _lock_state(folder / "lock")
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
    """Remove abandoned partial stores in `folder`: unlocked, and not touched for `older_s` seconds."""
    for partial in folder.glob(".*.partial"):
        with contextlib.suppress(OSError):
            if time.time() - (partial / "lock").stat().st_mtime < older_s:
                continue
            lock = _try_lock(partial / "lock")
            if lock is not None:
                discard(partial)
                os.close(lock)


def discard(folder: Path) -> None:
    """The lock goes last: another process finds the folder locked or gone, never an unlocked part of a store."""
    shutil.rmtree(folder / "store", ignore_errors=True)
    for name in ("journal", "journal.new", "lock"):
        with contextlib.suppress(OSError):
            (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _try_lock(file: Path) -> int | None:
    """A locked descriptor; None while another process holds the lock, or has just removed it. Raises OSError."""
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


def _lock_state(lock: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        status = lock.stat()
        return status.st_ino, status.st_mtime_ns
    return None


def _owner_of(lock: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        return f" ({int(lock.read_text())})"
    return ""


def journal_lines(journal: Path) -> list[dict[str, Any]]:
    """The journal's lines, up to the first that is incomplete or damaged."""
    lines: list[dict[str, Any]] = []
    with contextlib.suppress(OSError, ValueError, RecursionError):
        for line in journal.read_text().splitlines():
            fields = json.loads(line)
            if not isinstance(fields, dict) or seal(fields) != fields:
                break
            lines.append(fields)
    return lines


def layer_of(fields: Any) -> LayerSpec | None:
    """A LayerSpec from its `asdict`. None: these fields cannot be one."""
    try:
        spec = layer_from(fields)
        return spec if possible(spec) else None
    except (KeyError, TypeError, AttributeError):
        return None


def _same_layout(spec: LayerSpec, planned: LayerSpec) -> bool:
    shapes = [(tensor.name, tensor.shape) for tensor in spec.tensors]
    places = [(blob.offset, blob.length) for blob in spec.blobs]
    return (
        (spec.module, spec.file) == (planned.module, planned.file)
        and shapes == [(tensor.name, tensor.shape) for tensor in planned.tensors]
        and places == [(blob.offset, blob.length) for blob in planned.blobs]
    )
