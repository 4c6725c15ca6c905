"""Which expert is copied next, and to whom, so that as many workers as before hold each of a store in parts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import copy
from typing import NamedTuple

from scheduler.types import ExpertId


class Copy(NamedTuple):
    """An expert that has too few holders, and the worker that is to have it."""

    expert: ExpertId
    worker: int


class Holdings:
    """The experts that workers with slots hold; None: all. One that is lost counts as a holder for `wait_s` more: most
    come back. Before `first`, when all have had the time to start, nothing is short. Times are in seconds."""

    def __init__(self, experts: Collection[ExpertId], replicas: int, wait_s: float, first: float) -> None:
        self._experts = set(experts)
        self._replicas, self._wait_s, self._first = replicas, wait_s, first
        self._held: dict[int, frozenset[ExpertId] | None] = {}
        self._lost: dict[int, tuple[frozenset[ExpertId] | None, float]] = {}

    def on_held(self, worker: int, held: frozenset[ExpertId] | None) -> None:
        """It has joined, or holds others than before."""
        self._held[worker] = held
        self._lost.pop(worker, None)

    def on_lost(self, worker: int, now: float) -> None:
        if worker in self._held:
            self._lost[worker] = self._held.pop(worker), now

    def seen(self) -> Holdings:
        """As they are now. To count takes milliseconds if there are many experts; nobody need wait for that."""
        seen = copy(self)
        seen._held, seen._lost = dict(self._held), dict(self._lost)
        return seen

    def shortage(self, now: float) -> dict[ExpertId, int]:
        """Holders of each expert that has fewer than `replicas`, or than there are workers."""
        if now < self._first or not self._held:
            return {}
        waited_for = [held for held, lost in self._lost.values() if now - lost < self._wait_s]
        counts = dict.fromkeys(self._experts, 0)
        for held in [*self._held.values(), *waited_for]:
            for expert in self._experts if held is None else held & self._experts:
                counts[expert] += 1
        wanted = min(self._replicas, len(self._held))
        return {expert: count for expert, count in counts.items() if count < wanted}

    def next_copy(
        self, now: float, sizes: Mapping[ExpertId, int], full: Collection[int], unread: Collection[ExpertId] = ()
    ) -> Copy | None:
        """One of the experts with fewest holders, to the worker with fewest bytes. Not to those that are `full`, nor to
        those that hold all; none that is `unread`. `sizes`: bytes of each expert."""
        loads = {
            worker: sum(sizes.get(expert, 0) for expert in held)
            for worker, held in self._held.items()
            if held is not None and worker not in full
        }
        for expert, _ in sorted(self.shortage(now).items(), key=lambda one: (one[1], one[0])):
            able = [worker for worker in loads if expert not in (self._held[worker] or ())]
            if able and expert not in unread:
                return Copy(expert, min(able, key=lambda worker: (loads[worker], worker)))
        return None
