"""Host memory of the workers: a tier between disk and slots, with its own eviction policy.

Every load of a worker that has host slots goes through one of them, unless the policy does not keep the expert. An
expert that is there needs no read from disk. It stays when its slot is evicted: that is what the tier is for.

A worker carries out its loads in the order of their commands. So a host slot may be given to another expert while a
load from it is still queued.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from scheduler.policies.residency.base import Residency
from scheduler.types import ExpertId, WorkerJoined


@dataclass(slots=True, eq=False)
class HostEntry:
    """An expert in a host slot, or on its way there."""

    slot: int
    expert: ExpertId
    form: str
    load_id: int
    """Of the load that brings it; 0 once it is there."""


@dataclass(slots=True)
class HostMemory:
    """Of one worker."""

    free: list[int]
    """Numbers of the free host slots, a heap."""
    slots: int
    in_memory: dict[ExpertId, HostEntry] = field(default_factory=dict)
    """The one that was loaded longest ago first."""
    doubted: set[ExpertId] = field(default_factory=set)
    """The next load of these goes through no host slot. By that the worker knows to drop the bytes that it has."""

    def faults(self) -> Iterator[str]:
        """What does not agree in these books."""
        taken = sorted(one.slot for one in self.in_memory.values())
        if sorted([*taken, *self.free]) != list(range(self.slots)):
            yield f"of {self.slots} host slots, {taken} are taken and {sorted(self.free)} are free"
        if any(expert != one.expert for expert, one in self.in_memory.items()):
            yield "an expert in host memory stands under another's name"


class HostTable:
    """Decides which experts stay in host memory. `residency`: for all workers together.

    An expert may be in the host memory of several workers; the residency hears of the first that gets and of the last
    that loses it.
    """

    def __init__(self, memories: dict[int, HostMemory], residency: Residency) -> None:
        self.memories = memories
        self.residency = residency
        self._holders: dict[ExpertId, int] = {}
        self.loads = self.hits = 0
        """Loads of workers with host slots so far, and those of experts that were in host memory."""

    def on_worker_joined(self, event: WorkerJoined) -> None:
        self.on_worker_lost(event.worker)
        if event.host_slots > 0:
            self.memories[event.worker] = HostMemory(list(range(event.host_slots)), event.host_slots)

    def on_worker_lost(self, worker: int) -> None:
        memory = self.memories.pop(worker, None)
        for entry in list(memory.in_memory.values()) if memory is not None else ():
            self._left(worker, entry.expert)

    def on_shrunk(self, worker: int, slots: int) -> None:
        """The worker gave memory back: only its first `slots` host slots are left."""
        memory = self.memories.get(worker)
        if memory is None or slots >= memory.slots:
            return
        for entry in [one for one in memory.in_memory.values() if one.slot >= slots]:
            self._drop(worker, memory, entry)
        memory.free = [slot for slot in memory.free if slot < slots]
        heapify(memory.free)
        memory.slots = slots

    def expected_load_s(self, joined: WorkerJoined) -> float:
        """Seconds of a load on this worker, by the share of experts that were in host memory so far."""
        if not joined.host_slots or not joined.host_load_s:
            return joined.load_s
        share = self.hits / self.loads if self.loads else 0.0
        return share * joined.host_load_s + (1 - share) * joined.load_s

    # --- loads --------------------------------------------------------------------------------------------------

    def assign(
        self, worker: int, expert: ExpertId, form: str, load_id: int, predicted: bool
    ) -> tuple[int | None, bool]:
        """A load begins: the host slot that it goes through, None for none, and whether its bytes are there already.

        `predicted`: no gate has chosen the expert yet.
        """
        memory = self.memories.get(worker)
        if memory is None:
            return None, False
        self.loads += 1
        if expert in memory.doubted:
            memory.doubted.remove(expert)
            return None, False
        entry = memory.in_memory.get(expert)
        if entry is not None and entry.form == form:
            memory.in_memory[expert] = memory.in_memory.pop(expert)
            self.hits += entry.load_id == 0
            return entry.slot, entry.load_id == 0
        if entry is not None:
            self._drop(worker, memory, entry)
        slot = self._slot_for(worker, memory, expert) if self.residency.keeps(worker, expert, predicted) else None
        if slot is None:
            return None, False
        memory.in_memory[expert] = HostEntry(slot, expert, form, load_id)
        self._holders[expert] = self._holders.get(expert, 0) + 1
        return slot, False

    def find(self, worker: int, expert: ExpertId, form: str) -> int | None:
        """The host slot that has the expert's bytes; None where there is none. No policy hears of it."""
        memory = self.memories.get(worker)
        entry = memory.in_memory.get(expert) if memory is not None else None
        return entry.slot if entry is not None and entry.form == form and not entry.load_id else None

    def would_lose(self, worker: int, expert: ExpertId, form: str) -> bool:
        """It has the expert, but not in that form: a load that no host slot is assigned to would drop it there."""
        memory = self.memories.get(worker)
        return memory is not None and expert in memory.in_memory and self.find(worker, expert, form) is None

    def on_loaded(self, worker: int, expert: ExpertId, load_id: int) -> None:
        """A load has ended: the expert is in its host slot, too."""
        memory = self.memories.get(worker)
        entry = memory.in_memory.get(expert) if memory is not None else None
        if entry is not None and entry.load_id == load_id:
            entry.load_id = 0

    def on_given_up(self, worker: int, expert: ExpertId, load_id: int) -> None:
        """A load was given up, or has failed, before its end: what it was bringing is not whole."""
        memory = self.memories.get(worker)
        entry = memory.in_memory.get(expert) if memory is not None else None
        if memory is not None and entry is not None and entry.load_id == load_id:
            self._drop(worker, memory, entry)

    def on_doubted(self, worker: int, expert: ExpertId) -> None:
        """A load or a computation of the expert has failed: its bytes are read from disk the next time.

        The worker drops those of a failed load by itself. Of a wrong output it need not know.
        """
        memory = self.memories.get(worker)
        if memory is None:
            return
        entry = memory.in_memory.get(expert)
        if entry is None or not entry.load_id:
            memory.doubted.add(expert)
        if entry is not None:
            self._drop(worker, memory, entry)

    def _slot_for(self, worker: int, memory: HostMemory, expert: ExpertId) -> int | None:
        """A free one, else the residency's victim's. None: nobody gives way."""
        if not memory.free or self.residency.full(expert):
            there = [one for one, entry in memory.in_memory.items() if not entry.load_id]
            victim = self.residency.victim(worker, expert, there) if there else None
            if victim is not None:
                self._drop(worker, memory, memory.in_memory[victim])
        return heappop(memory.free) if memory.free else None

    def _drop(self, worker: int, memory: HostMemory, entry: HostEntry) -> None:
        del memory.in_memory[entry.expert]
        heappush(memory.free, entry.slot)
        self._left(worker, entry.expert)

    def _left(self, worker: int, expert: ExpertId) -> None:
        self._holders[expert] -= 1
        if not self._holders[expert]:
            del self._holders[expert]
            self.residency.on_left(worker, expert)
