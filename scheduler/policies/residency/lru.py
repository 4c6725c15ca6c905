"""Caches that everybody knows, as residencies: LRU, LFU, and a static set."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from scheduler.policies.predictors.base import Scores
from scheduler.policies.residency.base import PASSING, Cacheless, kept_slots
from scheduler.types import ExpertId, ModelShape, Visit


class LRU(Cacheless):
    """Everybody stays; the least recently used makes room (mixtral-offloading, section 3.1, there for each layer).

    Assumed: one order over all layers. A load counts as a use, so that what was loaded for a prediction is not the next
    to go.
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

    def used(self, worker: int, expert: ExpertId, hit: bool, score: float | None) -> None:
        self._touch(expert)

    def age(self, expert: ExpertId) -> int:
        """Grows with the last use; 0 where it was never used."""
        return self._last.get(expert, 0)

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        return min(evictable, key=self.age)


class LFU(LRU):
    """Everybody stays; the least frequently used makes room, among equals the least recently used.

    A use is a visit that computes it in its slot, for however many rows. Assumed: uses go on being counted when an
    expert has left, and counts do not age.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self._uses: dict[ExpertId, int] = {}

    def used(self, worker: int, expert: ExpertId, hit: bool, score: float | None) -> None:
        super().used(worker, expert, hit, score)
        self._uses[expert] = self._uses.get(expert, 0) + 1

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        uses = self._uses
        return min(evictable, key=lambda expert: (uses.get(expert, 0), self.age(expert)))


class Static(LRU):
    """A hot set that is chosen once: the experts that the first prefill activated most, for most rows (KTransformers
    and llama.cpp place experts before they answer). Whoever is not in it is evicted once it was computed.

    `passing`: slots left to those, at most half of all. Assumed: counted on the first prompt instead of offline; until
    then everybody stays and whoever the prompt activated least makes room.
    """

    def __init__(self, shape: ModelShape, passing: int = PASSING) -> None:
        super().__init__(shape)
        self.passing = passing
        self.hot: tuple[ExpertId, ...] = ()
        self._room = 0
        self._rows: dict[ExpertId, int] = {}
        self._fixed: frozenset[ExpertId] | None = None

    def check(self, shape: ModelShape, slots: int) -> None:
        self._room = kept_slots(shape, slots, self.passing)
        if self._fixed is not None:
            self._fix()

    def _fix(self) -> None:
        ranked = sorted(self._rows, key=lambda expert: (-self._rows[expert], expert))
        self.hot = tuple(ranked[: self._room])
        self._fixed = frozenset(self.hot)

    def observed(self, visit: Visit, named: Mapping[int, int], scores: Scores, prefill: bool) -> None:
        if prefill and self._fixed is None:
            for number, rows in named.items():
                expert = ExpertId(visit.layer, number)
                self._rows[expert] = self._rows.get(expert, 0) + rows

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
