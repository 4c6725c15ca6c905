"""A residency by what the requests under way have activated (MoE-Infinity)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from scheduler.errors import ConfigError
from scheduler.policies.predictors.base import Scores
from scheduler.policies.residency.base import Cacheless
from scheduler.types import ExpertId, ModelShape, Visit

EPSILON = 1e-4
"""Keeps the layers apart among experts that no token has activated."""

RECENT = 4
"""A request counts until so many passes of others have gone by since its last gate, unless said."""


class ActivationAware(Cacheless):
    """Everybody stays; whoever has the least (activation ratio + epsilon) x (1 - layer / layers) makes room
    (MoE-Infinity, expert caching). The ratio is the expert's part of its layer's rows in the request's activation
    matrix, prompt included; first layers weigh more, since predictions serve them least.

    Assumed: where several requests are under way their matrices are added; one whose gates have not fired for the time
    of `recent` passes is over.
    """

    def __init__(self, shape: ModelShape, recent: int = RECENT) -> None:
        if recent < 1:
            raise ConfigError(f"traces-recent is {recent}; allowed: 1, 2, ... passes")
        self.shape = shape
        self.recent = recent
        layers = len(shape.layers)
        self._decay = {layer: 1 - ordinal / layers for ordinal, layer in enumerate(shape.layers)}
        self._matrices: dict[int, dict[ExpertId, int]] = {}
        self._last: dict[int, int] = {}
        self._gates = 0
        self._rows: dict[ExpertId, int] = {}
        self._totals = dict.fromkeys(shape.layers, 0)

    def observed(self, visit: Visit, named: Mapping[int, int], scores: Scores, prefill: bool) -> None:
        self._gates += 1
        self._last[visit.request] = self._gates
        matrix = self._matrices.setdefault(visit.request, {})
        for number, count in named.items():
            expert = ExpertId(visit.layer, number)
            matrix[expert] = matrix.get(expert, 0) + count
            self._add(expert, count)
        oldest = self._gates - self.recent * len(self.shape.layers)
        for request in [request for request, last in self._last.items() if last < oldest]:
            del self._last[request]
            for expert, count in self._matrices.pop(request).items():
                self._add(expert, -count)

    def _add(self, expert: ExpertId, count: int) -> None:
        self._rows[expert] = self._rows.get(expert, 0) + count
        self._totals[expert.layer] += count

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        return True

    def priority(self, expert: ExpertId) -> float:
        """The least goes first."""
        ratio = self._rows.get(expert, 0) / (self._totals[expert.layer] or 1)
        return (ratio + EPSILON) * self._decay[expert.layer]

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        return min(evictable, key=self.priority)
