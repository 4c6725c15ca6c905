"""Well-known caches as residencies: LRU, LFU, and a static set."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from scheduler.policies.predictors.base import Scores
from scheduler.policies.residency.base import ResidencyBase, kept_slots
from scheduler.types import ExpertId, ModelShape, Visit


class LRU(ResidencyBase):
    """All experts stay; the least recently used is evicted (mixtral-offloading, section 3.1, there in each layer).

    Assumed: one order over all layers. A load counts as a use, so that a prefetched expert is not the next to go.
    """

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self._clock = 0
        self._last: dict[ExpertId, int] = {}

    def _touch(self, expert: ExpertId) -> None:
        self._clock += 1
        self._last[expert] = self._clock

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        self._touch(expert)
        return True

    def on_used(self, worker: int, expert: ExpertId, hit: bool, form: str) -> None:
        self._touch(expert)

    def age(self, expert: ExpertId) -> int:
        """A number that grows with the last use; 0 where it was never used."""
        return self._last.get(expert, 0)

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        return min(evictable, key=self.age)


class LFU(LRU):
    """All experts stay; the least frequently used is evicted, of equals the least recently used.

    A use is a visit that computes the expert in its slot, for any number of rows. Assumed: counts go on after an
    eviction and do not age.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self._uses: dict[ExpertId, int] = {}

    def on_used(self, worker: int, expert: ExpertId, hit: bool, form: str) -> None:
        super().on_used(worker, expert, hit, form)
        self._uses[expert] = self._uses.get(expert, 0) + 1

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        uses = self._uses
        return min(evictable, key=lambda expert: (uses.get(expert, 0), self.age(expert)))


class Static(LRU):
    """A hot set that is chosen once: the experts that the first prefill activated for most rows. All others are evicted
    once they are computed.

    It stands for llama.cpp as importance compares with it: "static expert caching in the GPU that does not adapt to
    workload changes" (section 6). llama.cpp itself places whole layers, or the experts of whole layers, and counts
    nothing, so this is the more favourable. Assumed: activations are counted on the first prompt. Until then all
    experts stay, and the one that the prompt activated least is evicted.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self.hot: tuple[ExpertId, ...] = ()
        self._kept_slots = 0
        self._rows: dict[ExpertId, int] = {}
        self._fixed: frozenset[ExpertId] | None = None

    def check(self, shape: ModelShape, slots: int) -> None:
        self._kept_slots = kept_slots(shape, slots)
        if self._fixed is not None:
            self._fix()

    def _fix(self) -> None:
        ranked = sorted(self._rows, key=lambda expert: (-self._rows[expert], expert))
        self.hot = tuple(ranked[: self._kept_slots])
        self._fixed = frozenset(self.hot)

    def on_gate_fired(self, visit: Visit, rows: Mapping[int, int], scores: Scores, prefill: bool) -> None:
        if prefill and self._fixed is None:
            for number, count in rows.items():
                expert = ExpertId(visit.layer, number)
                self._rows[expert] = self._rows.get(expert, 0) + count

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        self._touch(expert)
        return self._fixed is None or expert in self._fixed

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        if self._fixed is None:
            return min(evictable, key=lambda expert: (self._rows.get(expert, 0), self.age(expert)))
        cold = [expert for expert in evictable if expert not in self._fixed]
        return min(cold, key=self.age) if cold else None

    def warm(self, slots: int) -> Iterable[ExpertId]:
        if self._fixed is None and self._rows:
            self._fix()
        return self.hot[:slots]
