"""Loads through host memory into slots that are ordinary memory, too: of a worker without a cache, and in emulated time
of one with a device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from checkpoint.store import ExpertStore
from worker_node.loaders.base import HostLoader
from worker_node.loaders.digest import BlobDigest
from worker_node.loaders.host_tier import HostTier
from worker_node.loaders.memory import PIECE_BYTES, copy_pieces


class TieredLoader(HostLoader):
    """From `tier`, which reads from disk what it does not have."""

    name = "disk"
    piece_bytes = PIECE_BYTES

    def __init__(self, store: ExpertStore, tier: HostTier) -> None:
        super().__init__(store)
        self.tier = self._tier = tier

    def load(
        self,
        layer: int,
        expert: int,
        into: torch.Tensor,
        cancelled: Callable[[], bool],
        form: str = "",
        digest: BlobDigest | None = None,
    ) -> int:
        blob, digest = self._tier.fetch(layer, expert, form, cancelled, digest)
        if blob is None:
            return self._tier.disk.load(layer, expert, into, cancelled, form, digest)
        return copy_pieces(blob, into, cancelled, digest, self.piece_bytes)

    def reopen(self) -> None:
        self._tier.disk.reopen()

    def close(self) -> None:
        self._tier.close()
