"""Loads into slots on any device: from disk into host memory, and from there in one copy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from checkpoint.store import ExpertStore
from checkpoint.tensors import aligned_buffer
from worker_node.loaders.digest import BlobDigest
from worker_node.loaders.disk import DiskLoader
from worker_node.pace import Pace, RealPace


class DeviceLoader:
    """In the place of the CUDA loader."""

    name = "device"
    tier = None

    def __init__(self, store: ExpertStore, device: str) -> None:
        self.device = device
        self.pace: Pace = RealPace()
        self._disk = DiskLoader(store)
        self._staged = aligned_buffer(store.manifest.blob_bytes)

    def prepare(self, slots: list[torch.Tensor]) -> None:
        pass

    def load(
        self,
        layer: int,
        expert: int,
        into: torch.Tensor,
        cancelled: Callable[[], bool],
        form: str = "",
        digest: BlobDigest | None = None,
    ) -> int:
        nbytes = self._disk.load(layer, expert, self._staged, cancelled, form, digest)
        into[:nbytes].copy_(self._staged[:nbytes])
        return nbytes

    def reopen(self) -> None:
        self._disk.reopen()

    def computing(self, slot: torch.Tensor) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def close(self) -> None:
        self._disk.close()
