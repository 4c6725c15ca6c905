"""Host memory between disk and slots: experts that the scheduler keeps there, for loads without the disk."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from checkpoint.store import ExpertStore
from checkpoint.tensors import aligned_buffer, round_up
from scheduler.types import ExpertId
from worker_node.loaders.digest import BlobDigest
from worker_node.loaders.disk import DiskLoader
from worker_node.loaders.slab import SPARE, available_memory, lock_pages, unlock_pages

AREA_BYTES = 64 << 20
"""Host memory is taken and given back in areas of about this size: as far as slots are used, from the first on."""

LEAST_SPARE = SPARE // 2
"""Where less than this is left on the machine, areas are given back until `SPARE` is."""


class _Area:
    """The memory of some host slots. `pinned`: page-locked, so that a GPU can copy from it."""

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self.memory = aligned_buffer(nbytes)
        if pinned:
            lock_pages(self.memory)
            weakref.finalize(self, unlock_pages, self.memory.data_ptr()).atexit = False


class HostTier:
    """`slots` experts in host memory, in any of `forms`. It does as the scheduler says (`assign`), and looks for itself
    whether an expert is whole: bytes that are not there come from disk, whatever the scheduler believes.

    For one thread at a time: `Worker.loading` is held. `available`: bytes that are left on this machine.
    """

    def __init__(
        self,
        store: ExpertStore,
        slots: int,
        forms: tuple[str, ...] = ("",),
        pinned: bool = False,
        available: Callable[[], int] = available_memory,
    ) -> None:
        self.slots = slots
        """As many as there is memory for; fewer once the machine ran short of it."""
        self.bytes_max = 0
        """Most bytes of all areas at once, measured from them."""
        self.disk = DiskLoader(store)
        self._store = store
        self._slot_bytes = round_up(max(map(store.manifest.form_bytes, forms)))
        self._pinned = pinned
        self._available = available
        self._slots_an_area = max(1, AREA_BYTES // self._slot_bytes)
        self._areas: list[_Area] = []
        self._passing: _Area | None = None
        """For what may not stay, where a device copies from locked pages only."""
        self._content: dict[int, tuple[ExpertId, str]] = {}
        """Slot -> the expert and form that it has, or is to have."""
        self._slot_of: dict[ExpertId, int] = {}
        self._whole: set[int] = set()
        """Slots whose expert is there."""

    @property
    def allocated_bytes(self) -> int:
        passing = [self._passing] if self._passing is not None else []
        return sum(area.memory.untyped_storage().nbytes() for area in (*self._areas, *passing))

    def assign(self, slot: int | None, expert: ExpertId, form: str) -> bool:
        """See `Tier`."""
        at = self._slot_of.get(expert)
        if at is not None and (at != slot or self._content[at] != (expert, form)):
            self._clear(at)
        if slot is None or slot >= self.slots:
            return False
        if self._content.get(slot) != (expert, form):
            self._clear(slot)
            self._content[slot], self._slot_of[expert] = (expert, form), slot
        return slot in self._whole

    def fetch(
        self,
        layer: int,
        expert: int,
        form: str,
        cancelled: Callable[[], bool],
        digest: BlobDigest | None,
    ) -> tuple[torch.Tensor | None, BlobDigest | None]:
        """An expert's bytes in host memory, uint8, from disk if need be; fewer if `cancelled` became true. None where
        it was assigned no slot, and can be read straight to where it is to go. And the digest, if it has still to take
        them. Raises OSError or StoreError."""
        slot = self._slot_of.get(ExpertId(layer, expert))
        place = self._memory_of(slot) if slot is not None else None
        length = self._store.locate(layer, expert, form)[1].length
        if place is None:
            if not self._pinned:
                return None, digest
            if self._passing is None:
                self._passing = _Area(self._slot_bytes, True)
                self._note_bytes()
            place, slot = self._passing.memory, None
        if slot in self._whole:
            return place[:length], digest
        done = self.disk.load(layer, expert, place, cancelled, form, digest)
        if slot is not None and done == length:
            self._whole.add(slot)
        return place[:done], None

    def drop(self, expert: ExpertId) -> None:
        """Its bytes are not trusted any more."""
        slot = self._slot_of.get(expert)
        if slot is not None:
            self._clear(slot)

    def clear(self) -> None:
        """All experts go; the memory stays."""
        for slot in list(self._content):
            self._clear(slot)

    def relieve(self) -> bool:
        """See `Tier`."""
        left = self._available()
        return left < LEAST_SPARE and self._shrink(SPARE - left)

    def close(self) -> None:
        self.clear()
        self._areas.clear()
        self._passing = None
        self.disk.close()

    def _shrink(self, nbytes: int) -> bool:
        before = self.slots
        while nbytes > 0 and self._areas:
            nbytes -= self._areas.pop().memory.nbytes
        self.slots = min(self.slots, len(self._areas) * self._slots_an_area)
        for slot in [slot for slot in self._content if slot >= self.slots]:
            self._clear(slot)
        return self.slots < before

    def _memory_of(self, slot: int) -> torch.Tensor | None:
        """None where the machine has no memory for it any more."""
        area, place = divmod(slot, self._slots_an_area)
        while len(self._areas) <= area:
            count = min(self._slots_an_area, self.slots - len(self._areas) * self._slots_an_area)
            if self._available() < count * self._slot_bytes + LEAST_SPARE:
                self._shrink(0)
                return None
            self._areas.append(_Area(count * self._slot_bytes, self._pinned))
            self._note_bytes()
        start = place * self._slot_bytes
        return self._areas[area].memory[start : start + self._slot_bytes]

    def _note_bytes(self) -> None:
        self.bytes_max = max(self.bytes_max, self.allocated_bytes)

    def _clear(self, slot: int) -> None:
        content = self._content.pop(slot, None)
        if content is not None:
            self._slot_of.pop(content[0], None)
        self._whole.discard(slot)
