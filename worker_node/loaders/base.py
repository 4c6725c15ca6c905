"""Loaders: they move the bytes of an expert from the store to a slot."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch

from checkpoint.store import ExpertStore
from worker_node.loaders.digest import BlobDigest
from worker_node.pace import Pace, RealPace

if TYPE_CHECKING:
    from worker_node.loaders.host_tier import HostTier


class Loader(Protocol):
    """`load` is called from one thread, `computing` from another (the same where there is one slot)."""

    name: str
    device: str
    """The slots' device, as torch names it."""
    pace: Pace
    tier: HostTier | None
    """Host memory between disk and slots, if the scheduler decides what stays there."""

    def prepare(self, slots: list[torch.Tensor]) -> None:
        """Called once, first, with the buffers of all slots. Memory for loading is allocated here."""

    def load(
        self,
        layer: int,
        expert: int,
        into: torch.Tensor,
        cancelled: Callable[[], bool],
        form: str = "",
        digest: BlobDigest | None = None,
    ) -> int:
        """Move an expert's blob, in a form of the store, to the start of `into` (uint8, page-aligned).

        `digest` takes its bytes as they come. Returns the bytes moved, fewer if `cancelled` became true in between.
        Raises OSError or StoreError.
        """

    def reopen(self) -> None:
        """Files are opened again for the next load, since they may have been replaced."""

    def computing(self, slot: torch.Tensor) -> AbstractContextManager[object]:
        """Around a computation that reads the slot. It sees the loaded bytes; the next load waits until it is over."""

    def close(self) -> None: ...


class HostLoader:
    """A base class for slots in ordinary memory: nothing to prepare, to open again or to wait for."""

    device = "cpu"
    tier: HostTier | None = None
    piece_bytes: int
    """Moved between two checks for a cancellation."""

    def __init__(self, store: ExpertStore) -> None:
        self._store = store
        self.pace: Pace = RealPace()

    def prepare(self, slots: list[torch.Tensor]) -> None:
        pass

    def reopen(self) -> None:
        pass

    def computing(self, slot: torch.Tensor) -> AbstractContextManager[object]:
        return contextlib.nullcontext()
