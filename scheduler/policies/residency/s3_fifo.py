"""S3-FIFO: a small queue filters what is used once, a main queue keeps what is used again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from scheduler.policies.residency.base import ResidencyBase
from scheduler.types import ExpertId, ModelShape

SMALL_SHARE = 0.1
"""Of the slots (section 4.1 of the paper)."""
MOST_USES, PROMOTED = 3, 2
"""Two bits count the uses; from so many on an expert goes from the small queue to the main one (Algorithm 1)."""


class S3FIFO(ResidencyBase):
    """All experts stay; one that leaves the small queue unused, or else the main one, is evicted (Yang, Zhang, Qiu,
    Yue, Rashmi: "FIFO queues are all you need for cache eviction", SOSP 2023, Algorithm 1).

    A new expert enters the small queue, a tenth of the slots; one that is remembered from there enters the main queue.
    While the small queue has its tenth, its oldest leaves: to the main queue if it was used at least twice more, else
    out of the cache, remembered among as many as the main queue has slots. The main queue's oldest leaves if it was
    not used since it came there; else it goes round again, for one use less.

    Assumed: an expert that the core does not offer keeps its place and is passed over. If a promotion fills the main
    queue beyond its slots, that queue's victim is the one that is evicted. The load of an expert is no use of it.
    """

    def __init__(self, shape: ModelShape) -> None:
        self._small: OrderedDict[ExpertId, int] = OrderedDict()  # expert -> its uses; the oldest first
        self._main: OrderedDict[ExpertId, int] = OrderedDict()
        self._ghost: OrderedDict[ExpertId, None] = OrderedDict()
        self._small_slots = self._main_slots = 0

    def check(self, shape: ModelShape, slots: int) -> None:
        self._small_slots = max(1, int(SMALL_SHARE * slots))
        self._main_slots = max(0, slots - self._small_slots)

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        if expert not in self._small and expert not in self._main:
            remembered = expert in self._ghost
            self._ghost.pop(expert, None)
            (self._main if remembered else self._small)[expert] = 0
        return True

    def on_used(self, worker: int, expert: ExpertId, hit: bool, form: str) -> None:
        for queue in (self._small, self._main):
            if hit and expert in queue:
                queue[expert] = min(queue[expert] + 1, MOST_USES)

    def on_left(self, worker: int, expert: ExpertId) -> None:
        self._main.pop(expert, None)
        if self._small.pop(expert, None) is not None:
            self._ghost[expert] = None
            while len(self._ghost) > self._main_slots:
                self._ghost.popitem(last=False)

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        chosen = self._from_small(evictable) if len(self._small) >= self._small_slots else None
        return chosen or self._from_main(evictable) or self._from_small(evictable) or next(iter(evictable))

    def _from_small(self, among: Collection[ExpertId]) -> ExpertId | None:
        """EVICTS. None: all of these were promoted."""
        for expert in [one for one in self._small if one in among]:
            if self._small[expert] < PROMOTED:
                return expert
            del self._small[expert]
            self._main[expert] = 0
            if len(self._main) > self._main_slots and (chosen := self._from_main(among)):
                return chosen
        return None

    def _from_main(self, among: Collection[ExpertId]) -> ExpertId | None:
        """EVICTM."""
        waiting = [one for one in self._main if one in among]
        while waiting:
            for expert in waiting:
                if not self._main[expert]:
                    return expert
                self._main[expert] -= 1
                self._main.move_to_end(expert)
        return None
