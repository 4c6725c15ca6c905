"""Loads from host memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from checkpoint.store import ExpertStore
from worker_node.loaders.base import HostLoader
from worker_node.loaders.mapped_store import MappedStore


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
            stop = min(done + self.chunk, source.nbytes)
            into[done:stop].copy_(source[done:stop])
            done = stop
        return done

    def close(self) -> None:
        self._mapped.close()
