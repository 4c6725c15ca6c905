"""An expert store mapped into memory: experts' bytes without a copy, once their pages have been read."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch

from checkpoint.store import ExpertStore
from scheduler.errors import CorruptStoreError


class MappedStore:
    """A file is mapped on first use and stays mapped. Used by one thread at a time."""

    def __init__(self, store: ExpertStore) -> None:
        self._store = store
        self._maps: dict[Path, torch.Tensor] = {}

    def blob(self, layer: int, expert: int, form: str = "") -> torch.Tensor:
        """An expert's bytes in a form of the store: uint8 [length of its blob]. Not a copy: treat it as read-only.

        Checks the file's length each time: a read past a mapped file's end would kill the process. Raises StoreError
        for an expert that does not exist, CorruptStoreError where the file is truncated, OSError.
        """
        path, blob = self._store.locate(layer, expert, form)
        size = path.stat().st_size
        if size < blob.offset + blob.length:
            raise CorruptStoreError(f"{path} ends at byte {size}; make the store again")
        return self._map(path)[blob.offset : blob.offset + blob.length]

    def _map(self, path: Path) -> torch.Tensor:
        if path not in self._maps:
            with path.open("rb") as stream:
                # A private map: torch wants writable memory, the file stays as it is.
                area = mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            self._maps[path] = torch.frombuffer(area, dtype=torch.uint8)
        return self._maps[path]

    def close(self) -> None:
        self._maps.clear()
