"""SMOE's residency: a share of the slots for each layer, and who goes by frequency."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from scheduler.policies.predictors.base import Scores
from scheduler.policies.residency.base import PASSING, NamedByGates
from scheduler.policies.residency.shares import Shares
from scheduler.types import ExpertId, ModelShape, Visit


class Frequent(Shares):
    """SMOE's cache (section IV-E): as many slots for each layer; when prefill is over, filled with the experts that it
    activated most; in decoding only what was loaded for a prediction comes in, in the place of the layer's least
    frequently activated expert. What is loaded because its gate named it is evicted once it was computed.

    Fixed-N and adaptive are the predictor's: it says how many are loaded. Activations are counted by rows, in prefill
    and on through decoding, anew with each request's prefill. Assumed: that, and that slots which do not divide go to
    the first layers. In prefill those stay that are among their layer's most activated so far, so that little is left
    to load when it is over. `passing`: see Shares.
    """

    def __init__(self, shape: ModelShape, passing: int = PASSING) -> None:
        super().__init__(shape, passing)
        self._rows = {layer: [0] * count for layer, count in zip(shape.layers, self.counts, strict=True)}
        self._prompt: int | None = None
        self._prefill = True
        self._named = NamedByGates()

    def observed(self, visit: Visit, named: Mapping[int, int], scores: Scores, prefill: bool) -> None:
        if prefill and visit.request != self._prompt:
            self._prompt = visit.request
            for layer, rows in self._rows.items():
                self._rows[layer] = [0] * len(rows)
        self._prefill = prefill
        self._named.observed(visit, named)
        for number, count in named.items():
            self._rows[visit.layer][number] += count

    def activated(self, expert: ExpertId) -> int:
        """In how many rows since the latest prefill began."""
        return self._rows[expert.layer][expert.expert]

    def _frequent(self, expert: ExpertId) -> bool:
        """Among the most activated of its layer, as many as there is room for."""
        layer, number = expert
        mine = self.activated(expert)
        before = sum(rows > mine or (rows == mine and other < number) for other, rows in enumerate(self._rows[layer]))
        return before < self.share[layer]

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        if self._frequent(expert) if self._prefill else predicted:
            return super().keeps(worker, expert, predicted)
        self._workers.add(worker)
        return False

    def used(self, worker: int, expert: ExpertId, hit: bool, score: float | None) -> None:
        super().used(worker, expert, hit, score)
        self._named.used(expert)

    def full(self, incoming: ExpertId) -> bool:
        """Nobody makes room for what will not stay."""
        passes = not self._frequent(incoming) if self._prefill else incoming in self._named
        return not passes and super().full(incoming)

    def weakest(self, layer: int, incoming: ExpertId, among: Collection[ExpertId]) -> ExpertId | None:
        return min(among, key=lambda expert: (self.activated(expert), self.age(expert)))

    def warm(self, slots: int) -> Iterable[ExpertId]:
        chosen: list[ExpertId] = []
        for layer, share in self.share.items():
            ranked = sorted((ExpertId(layer, n) for n, rows in enumerate(self._rows[layer]) if rows), key=self._rank)
            chosen += ranked[:share]
        return sorted(chosen, key=self._rank)[:slots]

    def _rank(self, expert: ExpertId) -> tuple[int, bool, ExpertId]:
        return -self.activated(expert), expert not in self.kept[expert.layer], expert
