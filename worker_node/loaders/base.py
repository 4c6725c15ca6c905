"""Loads: bytes of an expert, from the store to a slot. What every loader offers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from checkpoint.store import ExpertStore
from worker_node.pace import Pace, RealPace

CHUNK = 32 << 20
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


class HostLoader:
    """What loaders share whose slots are ordinary memory: nothing to prepare, nothing to wait for."""

    device = "cpu"

    def __init__(self, store: ExpertStore) -> None:
        self._store = store
        self.chunk = CHUNK
        self.pace: Pace = RealPace()

    def prepare(self, slots: list[torch.Tensor]) -> None:
        pass

    def computing(self, slot: torch.Tensor) -> AbstractContextManager[object]:
        return contextlib.nullcontext()
