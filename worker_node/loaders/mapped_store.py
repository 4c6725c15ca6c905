"""An expert store mapped into memory: experts' bytes without a copy, once their pages have been read."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch

from checkpoint.store import ExpertStore
from scheduler.errors import CorruptStoreError


class MappedStore:
    """A file is mapped on first use and stays mapped. Used by one thread at a time."""

    def __init__(self, store: ExpertStore) -> None:
        self._store = store
        self._maps: dict[Path, tuple[int, torch.Tensor]] = {}
        """File -> its descriptor and its bytes."""
        self.written = 0, 0, 0
        """The file of the last blob: another value whenever it has been written to."""

    def blob(self, layer: int, expert: int, form: str = "") -> torch.Tensor:
        """An expert's bytes in a form of the store: uint8 [length of its blob]. Not a copy: treat it as read-only.

        Checks the file's length each time: a read past a mapped file's end would kill the process. Raises StoreError
        for an expert that does not exist, CorruptStoreError where the file is truncated, OSError.
        """
        path, blob = self._store.locate(layer, expert, form)
        file, data = self._maps.get(path) or self._map(path)
        state = os.fstat(file)
        size = state.st_size
        self.written = state.st_ino, state.st_mtime_ns, state.st_ctime_ns
        if size < blob.offset + blob.length:
            raise CorruptStoreError(f"{path} ends at byte {size}; make the store again")
        return data[blob.offset : blob.offset + blob.length]

    def _map(self, path: Path) -> tuple[int, torch.Tensor]:
        file = os.open(path, os.O_RDONLY)
        try:
            if not os.fstat(file).st_size:
                raise CorruptStoreError(f"{path} is empty; make the store again")
            # A private map: torch wants writable memory, the file stays as it is.
            area = mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(file)
            raise
        self._maps[path] = file, torch.frombuffer(area, dtype=torch.uint8)
        return self._maps[path]

    def close(self) -> None:
        for file, _ in self._maps.values():
            os.close(file)
        self._maps.clear()
