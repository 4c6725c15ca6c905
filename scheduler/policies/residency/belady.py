"""Belady's optimal eviction, and a predictor that is always right: bounds, in simulations only."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from scheduler.policies.future import Clairvoyant
from scheduler.policies.predictors.base import Forecast, PredictorBase, Scores
from scheduler.policies.residency.base import ChosenByGates, ResidencyBase
from scheduler.types import ExpertId, ModelShape, Visit

LOOKAHEAD = 16
"""Layers. What is right is loaded as early as a slot is worth it; more gained little."""


class Belady(Clairvoyant, ResidencyBase):
    """All experts stay; the one whose next use is farthest in the future is evicted (Belady, "A study of replacement
    algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966: MIN). No eviction policy has fewer
    misses.

    Requests that are answered together advance in lock-step, so the next use of an expert is the nearest one of any.
    For a prefetch nothing is evicted that is used earlier.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self._due = ChosenByGates()

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        return True

    def on_gate_fired(self, visit: Visit, rows: Mapping[int, int], scores: Scores, prefill: bool) -> None:
        self.future.on_gate_fired(visit)
        self._due.on_gate_fired(visit, rows)

    def on_used(self, worker: int, expert: ExpertId, hit: bool, form: str) -> None:
        self._due.on_used(expert)

    def _next_use(self, expert: ExpertId) -> float:
        return 0 if expert in self._due else self.future.next_use(expert)

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        farthest = max(evictable, key=self._next_use)
        return farthest if self._next_use(farthest) > self._next_use(incoming) else None


class PerfectPredictor(Clairvoyant, PredictorBase):
    """Names exactly the experts of the next layers, across the end of a token too, in decoding."""

    def __init__(self, shape: ModelShape) -> None:
        Clairvoyant.__init__(self)
        PredictorBase.__init__(self, shape)

    def on_pass_begun(self, visit: Visit, tokens: int, prefill: bool) -> Iterable[Forecast]:
        return () if prefill else self._forecasts(visit, 0, LOOKAHEAD)

    def on_gate_fired(self, visit: Visit, rows: Mapping[int, int], scores: Scores, prefill: bool) -> Iterable[Forecast]:
        return () if prefill else self._forecasts(visit, LOOKAHEAD, LOOKAHEAD + 1)

    def _forecasts(self, visit: Visit, first: int, end: int) -> list[Forecast]:
        """For the visits so many layers ahead."""
        layers = self.shape.layers
        at = layers.index(visit.layer)
        found = []
        for ahead in range(at + first, at + end):
            token, layer = divmod(ahead, len(layers))
            target = Visit(visit.request, visit.position + token, layers[layer])
            if chosen := self.future.chosen(target):
                found.append(Forecast(target, chosen))
        return found
