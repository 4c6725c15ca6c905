"""SMOE's residency: equal shares of the slots for each layer, eviction by frequency."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from scheduler.policies.predictors.base import Scores
from scheduler.policies.residency.base import ChosenByGates
from scheduler.policies.residency.shares import Shares
from scheduler.types import ExpertId, ModelShape, Visit


class Frequent(Shares):
    """SMOE's cache (IV-E): equally many slots for each layer. After prefill they are filled with the experts that it
    activated most. In decoding only prefetched experts stay, in place of the layer's least frequently activated expert.
    An expert that is loaded on demand is evicted once it is computed.

    Fixed-N and adaptive are choices of the predictor, which decides how many are loaded.

    Assumed: activations are counted by rows, in prefill and on through decoding, afresh with each request's prefill.
    Slots that do not divide go to the first layers. In prefill those experts stay that are among their layer's most
    activated so far, so that little is left to load when it is over.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self._rows = {layer: [0] * count for layer, count in zip(shape.layers, self.counts, strict=True)}
        self._prefill_request: int | None = None
        self._prefill = True
        self._chosen = ChosenByGates()

    def on_gate_fired(self, visit: Visit, rows: Mapping[int, int], scores: Scores, prefill: bool) -> None:
        if prefill and visit.request != self._prefill_request:
            self._prefill_request = visit.request
            for layer, counts in self._rows.items():
                self._rows[layer] = [0] * len(counts)
        self._prefill = prefill
        self._chosen.on_gate_fired(visit, rows)
        for number, count in rows.items():
            self._rows[visit.layer][number] += count

    def row_count(self, expert: ExpertId) -> int:
        """Rows since the latest prefill began."""
        return self._rows[expert.layer][expert.expert]

    def _frequent(self, expert: ExpertId) -> bool:
        """Among the most activated of its layer, as many as its share holds."""
        layer, number = expert
        own = self.row_count(expert)
        before = sum(rows > own or (rows == own and other < number) for other, rows in enumerate(self._rows[layer]))
        return before < self.share[layer]

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        if self._frequent(expert) if self._prefill else predicted:
            return super().keeps(worker, expert, predicted)
        self._workers.add(worker)
        return False

    def on_used(self, worker: int, expert: ExpertId, hit: bool, form: str) -> None:
        super().on_used(worker, expert, hit, form)
        self._chosen.on_used(expert)

    def full(self, incoming: ExpertId) -> bool:
        """Nothing is evicted for an expert that will not stay."""
        passes = not self._frequent(incoming) if self._prefill else incoming in self._chosen
        return not passes and super().full(incoming)

    def weakest(self, layer: int, incoming: ExpertId, among: Collection[ExpertId]) -> ExpertId | None:
        return min(among, key=lambda expert: (self.row_count(expert), self.age(expert)))

    def warm(self, slots: int) -> Iterable[ExpertId]:
        most_activated: list[ExpertId] = []
        for layer, share in self.share.items():
            ranked = sorted((ExpertId(layer, n) for n, rows in enumerate(self._rows[layer]) if rows), key=self._rank)
            most_activated += ranked[:share]
        return sorted(most_activated, key=self._rank)[:slots]

    def _rank(self, expert: ExpertId) -> tuple[int, bool, ExpertId]:
        return -self.row_count(expert), expert not in self.kept[expert.layer], expert
