"""Residencies by the scores of gates: who scored least lately makes room, active or not."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from scheduler.errors import ConfigError
from scheduler.policies.predictors.base import Scores
from scheduler.policies.residency.base import Cacheless, NamedByGates
from scheduler.types import ExpertId, ModelShape, Visit

WINDOW = 32
"""Of so many iterations scores are averaged, unless said. The paper leaves n open; on the demo model more is better."""

ALPHA = 0.1
"""What the newest score weighs, unless said; on the demo model less is better, down to this."""


class Scored(Cacheless):
    """A base: everybody stays, and whoever has the least value, over the experts of all layers, makes room; among
    equals the one that nobody has needed for longest. `value`: layer -> that of each expert.

    Assumed: scores are compared over layers as shares of their row's sum. A pass of several rows counts as one, with
    their mean. Before a layer's first gate its experts are worth the same share each. Where no scores come, the rows
    that each expert was named for stand in.
    """

    wants_scores = True

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self.counts = {layer: shape.count(ordinal) for ordinal, layer in enumerate(shape.layers)}
        self.value: dict[int, Sequence[float]] = {layer: [1 / count] * count for layer, count in self.counts.items()}

    def _revalue(self, layer: int, shares: Sequence[float]) -> None:
        """A gate has fired; `shares`: each expert's mean share of a row's scores."""
        raise NotImplementedError

    def _row(self, row: Sequence[float]) -> Sequence[float]:
        """Each expert's share of a row's scores, as it is to count."""
        total = sum(row)
        return [score / total for score in row] if total > 0 else row

    def observed(self, visit: Visit, named: Mapping[int, int], scores: Scores, prefill: bool) -> None:
        if not scores:
            scores = (tuple(float(named.get(number, 0)) for number in range(self.counts[visit.layer])),)
        rows = [self._row(row) for row in scores]
        self._revalue(visit.layer, [sum(column) / len(rows) for column in zip(*rows, strict=True)])

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        return True

    def worth(self, expert: ExpertId) -> float:
        return self.value[expert.layer][expert.expert]

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        return min(evictable, key=self.worth)


class ScoreWindow(Scored):
    """Evicts the expert with the lowest mean score over the preceding `window` iterations, inactive experts included
    (Importance-Driven Expert Scheduling, section 5.3).

    The shield: what the gate of the layer under way has named makes room for nobody. It begins with the gate; from when
    the expert is in use, the core's own rule stands for it, until its computation is over; for what was named and not
    used (computed elsewhere, or replaced by the router) it ends with that request's next gate.
    """

    def __init__(self, shape: ModelShape, window: int = WINDOW) -> None:
        super().__init__(shape)
        if window < 1:
            raise ConfigError(f"score-window is {window}; allowed: 1, 2, ... iterations")
        self.window = window
        self._seen: dict[int, deque[Sequence[float]]] = {layer: deque(maxlen=window) for layer in shape.layers}
        self._shield = NamedByGates()

    def _revalue(self, layer: int, shares: Sequence[float]) -> None:
        seen = self._seen[layer]
        seen.append(shares)
        self.value[layer] = [sum(column) / len(seen) for column in zip(*seen, strict=True)]

    def observed(self, visit: Visit, named: Mapping[int, int], scores: Scores, prefill: bool) -> None:
        super().observed(visit, named, scores, prefill)
        self._shield.observed(visit, named)

    def used(self, worker: int, expert: ExpertId, hit: bool, score: float | None) -> None:
        self._shield.used(expert)

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        bare = [expert for expert in evictable if expert not in self._shield]
        return super().victim(worker, incoming, bare) if bare else None


class RecentScore(Scored):
    """HybriMoE's score-aware cache (section IV-D, "MRS"): a value S <- alpha TopP(s) + (1 - alpha) S for each expert,
    TopP zero for all but the `top` highest scores of a row; the least S makes room.

    Assumed: `top` None is twice the experts a token, as the paper mostly has it. One S over all layers' experts.
    """

    def __init__(self, shape: ModelShape, alpha: float = ALPHA, top: int | None = None) -> None:
        super().__init__(shape)
        if not 0 < alpha <= 1:
            raise ConfigError(f"score-weight is {alpha}; allowed: above 0, to 1")
        if top is not None and top < 1:
            raise ConfigError(f"score-top is {top}; allowed: 1, 2, ... experts")
        self.alpha = alpha
        self.top = 2 * shape.top_k if top is None else top

    def _row(self, row: Sequence[float]) -> Sequence[float]:
        best = set(sorted(range(len(row)), key=lambda number: (-row[number], number))[: self.top])
        return [share if number in best else 0.0 for number, share in enumerate(super()._row(row))]

    def _revalue(self, layer: int, shares: Sequence[float]) -> None:
        alpha = self.alpha
        self.value[layer] = [
            alpha * new + (1 - alpha) * old for new, old in zip(shares, self.value[layer], strict=True)
        ]
