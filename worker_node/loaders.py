"""Loads: bytes of an expert, from the store to a slot."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from typing import Protocol

import torch

from checkpoint.store import ExpertStore
from checkpoint.tensors import PAGE
from scheduler.errors import ConfigError, CorruptStoreError

LOADERS = ("disk", "memory")
_CHUNK = 8 << 20


class Loader(Protocol):
    name: str

    def load(self, layer: int, expert: int, into: torch.Tensor, cancelled: Callable[[], bool]) -> int:
        """Move an expert's blob to the start of `into` (uint8, page-aligned); bytes moved, fewer when `cancelled`
        became true on the way. Raises OSError or CorruptStoreError."""

    def close(self) -> None: ...


def make_loader(name: str, store: ExpertStore) -> Loader:
    """Raises ConfigError for an unknown name."""
    if name == "disk":
        return DiskLoader(store)
    if name == "memory":
        return MemoryLoader(store)
    raise ConfigError(f"loader {name!r} is unknown; allowed: {', '.join(LOADERS)}")


class DiskLoader:
    """`preadv` straight into the slot; O_DIRECT where the file system allows it, so that nothing stays in the page
    cache behind the slot's back. Elsewhere the pages read are dropped from the cache after each load."""

    name = "disk"

    def __init__(self, store: ExpertStore) -> None:
        self._store = store
        self._files: dict[str, int] = {}
        self.direct = True

    def load(self, layer: int, expert: int, into: torch.Tensor, cancelled: Callable[[], bool]) -> int:
        path, blob = self._store.locate(layer, expert)
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
                self._files[path] = os.open(path, flags)
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


class MemoryLoader:
    """Copies from the mapped store: host memory once its pages have been read."""

    name = "memory"

    def __init__(self, store: ExpertStore) -> None:
        self._store = store
        self._maps: dict[str, torch.Tensor] = {}

    def load(self, layer: int, expert: int, into: torch.Tensor, cancelled: Callable[[], bool]) -> int:
        path, blob = self._store.locate(layer, expert)
        size = path.stat().st_size
        if size < blob.offset + blob.length:  # a read behind a mapped file's end would kill the process
            raise CorruptStoreError(f"{path} ends at byte {size}; make the store again")
        source = self._map(str(path))
        done = 0
        while done < blob.length and not cancelled():
            stop = min(done + _CHUNK, blob.length)
            into[done:stop].copy_(source[blob.offset + done : blob.offset + stop])
            done = stop
        return done

    def _map(self, path: str) -> torch.Tensor:
        if path not in self._maps:
            with open(path, "rb") as stream:
                # A private map: torch wants writable memory, the file stays as it is.
                area = mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            self._maps[path] = torch.frombuffer(area, dtype=torch.uint8)
        return self._maps[path]

    def close(self) -> None:
        self._maps.clear()
