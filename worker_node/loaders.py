"""Loads: bytes of an expert, from the store to a slot."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from checkpoint.store import ExpertStore
from checkpoint.tensors import PAGE
from scheduler.emulation.clock import Emulation
from scheduler.errors import ConfigError, CorruptStoreError
from worker_node.mapped import MappedStore
from worker_node.pace import EmulatedPace, Pace, RealPace

LOADERS = ("disk", "memory", "cuda", "emulated")
_CHUNK = 32 << 20
"""Bytes between two looks at whether a load is still wanted. Fewer cost bandwidth: 8 MiB a tenth, on a busy machine."""


class Loader(Protocol):
    """How bytes come to a slot, on which device that is, and in which time. `load` is called from one thread,
    `computing` from another (the same where there is one slot)."""

    name: str
    device: str
    pace: Pace

    def prepare(self, slots: list[torch.Tensor]) -> None:
        """Told once, before all else: the buffers that will be loaded into. What is needed is allocated here."""

    def load(self, layer: int, expert: int, into: torch.Tensor, cancelled: Callable[[], bool], form: str = "") -> int:
        """Move an expert's blob, in a form of the store, to the start of `into` (uint8, page-aligned); bytes moved,
        fewer when `cancelled` became true on the way. Raises OSError or StoreError."""

    def computing(self, slot: torch.Tensor) -> AbstractContextManager[object]:
        """Around a computation that reads the slot: it sees what was loaded, the next load waits until it has left."""

    def close(self) -> None: ...


def make_loader(
    name: str,
    store: ExpertStore,
    emulation: Emulation | None = None,
    moved_by: str = "disk",
    forms: tuple[str, ...] = ("",),
) -> Loader:
    """`emulation`: needed by `emulated`, whose bytes are `moved_by` another loader. `forms`: all that will be loaded.
    Raises ConfigError for an unknown name, LaunchError where memory does not suffice."""
    if name == "disk":
        return DiskLoader(store)
    if name == "memory":
        return MemoryLoader(store)
    if name == "cuda":
        from worker_node.cuda import CudaLoader

        return CudaLoader(store, forms=forms)
    if name == "emulated":
        if emulation is None:
            raise ConfigError("loader 'emulated' needs a profile, whose times it keeps")
        if moved_by != "emulated":
            return EmulatedLoader(make_loader(moved_by, store, forms=forms), emulation)
        raise ConfigError("an emulated loader's bytes are moved by disk, memory or cuda")
    raise ConfigError(f"loader {name!r} is unknown; allowed: {', '.join(LOADERS)}")


class HostLoader:
    """What loaders share whose slots are ordinary memory: nothing to prepare, nothing to wait for."""

    device = "cpu"

    def __init__(self, store: ExpertStore) -> None:
        self._store = store
        self.pace: Pace = RealPace()

    def prepare(self, slots: list[torch.Tensor]) -> None:
        pass

    def computing(self, slot: torch.Tensor) -> AbstractContextManager[object]:
        return contextlib.nullcontext()


class EmulatedLoader:
    """Moves the bytes as the loader inside does, in the time of a profile: see `scheduler.emulation.clock`."""

    name = "emulated"

    def __init__(self, inner: Loader, emulation: Emulation) -> None:
        self.pace: Pace = EmulatedPace(emulation)
        self.device = inner.device
        self.prepare, self.load, self.computing, self.close = inner.prepare, inner.load, inner.computing, inner.close


class DiskLoader(HostLoader):
    """`preadv` straight into the slot; O_DIRECT where the file system allows it, so that nothing stays in the page
    cache behind the slot's back. Elsewhere the pages read are dropped from the cache after each load."""

    name = "disk"

    def __init__(self, store: ExpertStore) -> None:
        super().__init__(store)
        self._files: dict[str, int] = {}
        self.direct = True

    def load(self, layer: int, expert: int, into: torch.Tensor, cancelled: Callable[[], bool], form: str = "") -> int:
        path, blob = self._store.locate(layer, expert, form)
        file = self._open(str(path))
        target = into.numpy().data
        done = 0
        while done < blob.length and not cancelled():
            stop = min(done + _CHUNK, blob.length)
            try:
                got = os.preadv(file, [target[done:stop]], blob.offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self.direct:
                    raise
                file = self._without_direct(str(path))
                continue
            if got == 0:
                raise CorruptStoreError(f"{path} ends at byte {blob.offset + done}; make the store again")
            done += got
            if done % PAGE and self.direct and done < blob.length:
                file = self._without_direct(str(path))
        if not self.direct:
            os.posix_fadvise(file, blob.offset, blob.length, os.POSIX_FADV_DONTNEED)
        return done

    def _open(self, path: str) -> int:
        if path not in self._files:
            try:
                flags = os.O_RDONLY | (os.O_DIRECT if self.direct else 0)
                self._files[path] = file = os.open(path, flags)
                if not self.direct:  # read-ahead would leave the next expert's pages
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
            except OSError as error:
                if error.errno != errno.EINVAL or not self.direct:
                    raise
                return self._without_direct(path)
        return self._files[path]

    def _without_direct(self, path: str) -> int:
        self.direct = False
        self.close()
        return self._open(path)

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()


class MemoryLoader(HostLoader):
    """Copies from the mapped store: host memory once its pages have been read."""

    name = "memory"

    def __init__(self, store: ExpertStore) -> None:
        super().__init__(store)
        self._mapped = MappedStore(store)

    def load(self, layer: int, expert: int, into: torch.Tensor, cancelled: Callable[[], bool], form: str = "") -> int:
        source = self._mapped.blob(layer, expert, form)
        done = 0
        while done < source.nbytes and not cancelled():
            stop = min(done + _CHUNK, source.nbytes)
            into[done:stop].copy_(source[done:stop])
            done = stop
        return done

    def close(self) -> None:
        self._mapped.close()
