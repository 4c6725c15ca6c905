"""Loaders: they move the bytes of an expert from the store to a slot."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from checkpoint.store import ExpertStore
from scheduler.types import ExpertId
from worker_node.loaders.digest import BlobDigest
from worker_node.pace import Pace, RealPace


class Tier(Protocol):
    """Host memory between disk and slots, in which the scheduler decides what stays. For one thread at a time."""

    slots: int
    """Experts for which there is room; fewer once the machine ran short of memory."""
    bytes_max: int
    """Most bytes at once, measured from the buffers."""

    def assign(self, slot: int | None, expert: ExpertId, form: str) -> bool:
        """The next load of the expert goes through this slot, and stays there; None: through none. Returns whether it
        is there already."""

    def drop(self, expert: ExpertId) -> None:
        """Its bytes are not trusted any more."""

    def clear(self) -> None:
        """All experts go; the memory stays."""

    def relieve(self) -> bool:
        """Give memory back if little is left on this machine. Returns whether there are fewer slots now."""


class Loader(Protocol):
    """`load` is called from one thread, `computing` from another (the same where there is one slot)."""

    name: str
    device: str
    """The slots' device, as torch names it."""
    pace: Pace
    tier: Tier | None
    """None: the loader brings all experts the same way."""

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
    tier: Tier | None = None
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
