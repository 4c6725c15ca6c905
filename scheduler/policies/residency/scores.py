"""Residencies by the gates' scores: the expert that scored least lately is evicted, active or not."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from scheduler.policies.predictors.base import Scores
from scheduler.policies.residency.base import ChosenByGates, ResidencyBase
from scheduler.types import ExpertId, ModelShape, Visit

Values = NDArray[np.float64]
WINDOW = 16
"""Importance, 5.3: iterations over which scores are averaged. The paper leaves n open: of 4 to 64 the best on half of
the requests of two traces (docs/papers.md)."""


class Scored(ResidencyBase):
    """A base class: all experts stay, and the one of the least value over all layers is evicted. Of equals the one that
    has been unneeded for longest.

    Assumed: scores are compared over layers as shares of their row's sum. A pass of several rows counts as one, with
    their mean. Before a layer's first gate its experts have equal shares. Without scores, the rows of each expert stand
    in for them.
    """

    wants_scores = True

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self.counts = {layer: shape.count(ordinal) for ordinal, layer in enumerate(shape.layers)}
        self.value: dict[int, list[float]] = {layer: [1 / count] * count for layer, count in self.counts.items()}
        """Layer -> one value an expert."""

    def _new_values(self, layer: int, shares: Values) -> Values:
        """A gate has fired: the layer's new values. `shares` [experts]: each expert's mean share of a row's scores."""
        raise NotImplementedError

    def _shares(self, scores: Values) -> Values:
        """Each expert's share of its row's scores, [rows, experts]."""
        totals = scores.sum(axis=1, keepdims=True)
        shares: Values = np.divide(scores, totals, out=scores.copy(), where=totals > 0)
        return shares

    def on_gate_fired(self, visit: Visit, rows: Mapping[int, int], scores: Scores, prefill: bool) -> None:
        if not scores:
            scores = (tuple(float(rows.get(number, 0)) for number in range(self.counts[visit.layer])),)
        shares = self._shares(np.asarray(scores, dtype=np.float64)).mean(axis=0)
        self.value[visit.layer] = self._new_values(visit.layer, shares).tolist()

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        return True

    def worth(self, expert: ExpertId) -> float:
        return self.value[expert.layer][expert.expert]

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        return min(evictable, key=self.worth)


class ScoreWindow(Scored):
    """Evicts the expert with the lowest mean score over the last `window` iterations, inactive experts included
    (Importance-Driven Expert Scheduling, 5.3). Assumed: each pass of several requests is an iteration.

    The shield: experts that the gate of the current layer has chosen are not evicted. It begins with the gate. From the
    moment when the expert is in use, the core itself protects it, until its computation is over. For an expert that was
    chosen and not used (computed elsewhere, or replaced by the router) the shield ends with the request's next gate.
    """

    def __init__(self, shape: ModelShape, window: int = WINDOW) -> None:
        super().__init__(shape)
        self._recent: dict[int, deque[Values]] = {layer: deque(maxlen=window) for layer in shape.layers}
        self._shield = ChosenByGates()

    def _new_values(self, layer: int, shares: Values) -> Values:
        recent = self._recent[layer]
        recent.append(shares)
        values: Values = np.mean(recent, axis=0)
        return values

    def on_gate_fired(self, visit: Visit, rows: Mapping[int, int], scores: Scores, prefill: bool) -> None:
        super().on_gate_fired(visit, rows, scores, prefill)
        self._shield.on_gate_fired(visit, rows)

    def on_used(self, worker: int, expert: ExpertId, hit: bool, form: str) -> None:
        self._shield.on_used(expert)

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        unshielded = [expert for expert in evictable if expert not in self._shield]
        return super().victim(worker, incoming, unshielded) if unshielded else None
