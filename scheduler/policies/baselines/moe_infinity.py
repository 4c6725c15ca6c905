"""MoE-Infinity: prediction and caching from request-level activation matrices.

A request's activation matrix counts how often each expert of each layer was chosen for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from scheduler.policies.baselines.counting import Counts, heaviest, row_counts
from scheduler.policies.predictors.base import Forecast, PredictorBase, Scores
from scheduler.policies.residency.base import ResidencyBase
from scheduler.types import ExpertId, ModelShape, Visit

CAPACITY = 64
"""Matrices of past requests that are stored. Assumed."""

AHEAD = 2
"""Layers that are predicted at each gate. Assumed: MoE-Infinity queues all following layers, at falling priority."""

EPSILON = 1e-4
"""MoE-Infinity, expert caching: keeps layers apart among experts that no token has activated."""

RECENT_PASSES = 4
"""A request whose gates have not fired for the time of so many passes is over. Assumed."""


class _OpenRequest:
    """An open request: its activation matrix, and its likeness to each stored one."""

    def __init__(self, layers: int, experts: int, stored: int) -> None:
        self.counts = np.zeros((layers, experts), dtype=np.float32)
        self.likeness = np.zeros((stored, layers), dtype=np.float32)
        """Layer by layer: the cosine of this request's counts and the stored ones."""
        self.seen = np.zeros(layers, dtype=bool)


class RequestTraces(PredictorBase):
    """The next layers' experts as in the earlier request whose activations were most like this one's so far
    (MoE-Infinity: expert activation matrices and their collection).

    Likeness is the cosine of two layers' counts, averaged over the layers that the request has been through. Each gate
    gives forecasts for the next `AHEAD` layers, nearest first: the most frequent experts of the nearest matrix, as many
    as the gate chose. The matrix of a finished request is stored; of `CAPACITY` matrices it replaces the one most like
    it. Assumed: while nothing is stored, the request's own counts serve.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self._ordinal = {layer: ordinal for ordinal, layer in enumerate(shape.layers)}
        self._stored = np.zeros((0, len(shape.layers), shape.experts), dtype=np.float32)
        """Each layer's counts as a unit vector, or zeros if the layer was never reached."""
        self._open: dict[int, _OpenRequest] = {}

    def on_pass_begun(self, visit: Visit, tokens: int, prefill: bool) -> Iterable[Forecast]:
        request = self._open.get(visit.request)
        if prefill or request is None:
            return ()
        return self._ahead(visit, request, -1, self.shape.top_k * tokens)

    def on_gate_fired(self, visit: Visit, rows: Mapping[int, int], scores: Scores, prefill: bool) -> Iterable[Forecast]:
        at = self._ordinal[visit.layer]
        request = self._open.get(visit.request)
        if request is None:
            request = _OpenRequest(len(self.shape.layers), self.shape.experts, len(self._stored))
            self._open[visit.request] = request
        request.counts[at] += row_counts(rows, self.shape.experts)
        request.seen[at] = True
        request.likeness[:, at] = self._stored[:, at] @ _unit(request.counts[at])
        return self._ahead(visit, request, at, len(rows))

    def _ahead(self, visit: Visit, request: _OpenRequest, at: int, count: int) -> list[Forecast]:
        matrix = self._stored[self._nearest(request)] if len(self._stored) else request.counts
        forecasts = []
        for ordinal in range(at + 1, min(at + 1 + AHEAD, len(self.shape.layers))):
            expected = heaviest(matrix[ordinal], count)
            if expected:
                forecasts.append(Forecast(visit._replace(layer=self.shape.layers[ordinal]), expected))
        return forecasts

    def _nearest(self, request: _OpenRequest) -> int:
        return int(np.argmax(request.likeness[:, request.seen].sum(axis=1)))

    def on_request_closed(self, request: int) -> None:
        finished = self._open.pop(request, None)
        if finished is None:
            return
        unit = _unit(finished.counts)
        if len(self._stored) < CAPACITY:
            self._stored = np.concatenate([self._stored, unit[None]])
        else:
            self._stored[self._nearest(finished)] = unit
        for other in self._open.values():
            other.likeness = np.einsum("cle,le->cl", self._stored, _unit(other.counts))


def _unit(counts: Counts) -> Counts:
    """Unit vectors along the last axis; zeros stay zeros."""
    length = np.linalg.norm(counts, axis=-1, keepdims=True)
    unit: Counts = np.divide(counts, length, out=np.zeros_like(counts), where=length > 0)
    return unit


class ActivationAware(ResidencyBase):
    """All experts stay; the one with the least (activation ratio + epsilon) x (1 - layer / layers) is evicted
    (MoE-Infinity, expert caching).

    The ratio is the expert's part of its layer's rows in the request's activation matrix, prompt included. First layers
    weigh more, since predictions serve them least. Assumed: the matrices of requests under way are added.
    """

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        layers = len(shape.layers)
        self._decay = {layer: 1 - ordinal / layers for ordinal, layer in enumerate(shape.layers)}
        self._matrices: dict[int, dict[ExpertId, int]] = {}  # request -> expert -> rows
        self._last: dict[int, int] = {}  # request -> number of its last gate
        self._gates = 0
        self._rows: dict[ExpertId, int] = {}
        self._totals = dict.fromkeys(shape.layers, 0)

    def on_gate_fired(self, visit: Visit, rows: Mapping[int, int], scores: Scores, prefill: bool) -> None:
        self._gates += 1
        self._last[visit.request] = self._gates
        matrix = self._matrices.setdefault(visit.request, {})
        for number, count in rows.items():
            expert = ExpertId(visit.layer, number)
            matrix[expert] = matrix.get(expert, 0) + count
            self._add(expert, count)
        oldest = self._gates - RECENT_PASSES * len(self.shape.layers)
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
        """The expert with the least is evicted first."""
        ratio = self._rows.get(expert, 0) / (self._totals[expert.layer] or 1)
        return (ratio + EPSILON) * self._decay[expert.layer]

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        return min(evictable, key=self.priority)
