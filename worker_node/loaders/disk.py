"""Loads from disk, past the page cache."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import torch

from checkpoint.store import ExpertStore
from checkpoint.tensors import PAGE
from scheduler.errors import CorruptStoreError
from worker_node.loaders.base import HostLoader
from worker_node.loaders.digest import TAIL_BYTES, BlobDigest


class DiskLoader(HostLoader):
    """`preadv` straight into the slot. O_DIRECT where the file system allows it, so that no expert stays in the page
    cache. Elsewhere the pages are dropped from the cache after each load."""

    name = "disk"
    piece_bytes = 32 << 20
    """The disk rests between two reads. With 8 MiB a load takes 7 % longer, with 4 MiB 13 %, on a disk of 2 GB/s; an
    earlier end of those that are given up gains less than 1 %."""

    def __init__(self, store: ExpertStore) -> None:
        super().__init__(store)
        self._files: dict[str, int] = {}
        self.direct = True

    def load(
        self,
        layer: int,
        expert: int,
        into: torch.Tensor,
        cancelled: Callable[[], bool],
        form: str = "",
        digest: BlobDigest | None = None,
    ) -> int:
        path, blob = self._store.locate(layer, expert, form)
        file = self._open(str(path))
        target = into.numpy().data
        done = 0
        while done < blob.length and not cancelled():
            stop = min(done + self.piece_bytes, blob.length)
            if digest is not None and stop == blob.length and stop - done > 2 * TAIL_BYTES:
                stop -= TAIL_BYTES
            try:
                got = os.preadv(file, [target[done:stop]], blob.offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self.direct:
                    raise
                file = self._without_direct(str(path))
                continue
            if got == 0:
                raise CorruptStoreError(f"{path} ends at byte {blob.offset + done}; make the store again")
            if digest is not None:
                digest.add(target[done : done + got], more=done + got < blob.length)
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

    def reopen(self) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()
