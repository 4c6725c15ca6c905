"""Mixtral-offloading (Eliseev and Mazur): speculative expert loading from the next layer's gate.

Its cache, LRU in each layer, is `scheduler.policies.residency.shares.Shares`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from scheduler.policies.predictors.base import Forecast, Foresight, PredictorBase, Scores
from scheduler.policies.predictors.ranking import popularity
from scheduler.types import ModelShape, Visit


class NextGate(PredictorBase):
    """The next layer's gate on this layer's gate input: its top-k are expected.

    The best `prefetch` of the gate's ranking are prefetched. Assumed: the top-k unless given (the paper tries 1 and 2
    for a top-2 model). Of several rows, the expert that most rows choose comes first. Nothing is predicted in prefill,
    where the paper loads layer by layer.
    """

    foresight: Foresight | None = "gate"

    def __init__(self, shape: ModelShape, prefetch: int | None = None) -> None:
        super().__init__(shape)
        self.prefetch = prefetch

    def on_foreseen(self, visit: Visit, scores: Scores, resident: Collection[int], prefill: bool) -> Iterable[Forecast]:
        return [self._forecast(visit, scores)] if scores and not prefill else ()

    def _forecast(self, visit: Visit, scores: Scores) -> Forecast:
        order, rows = popularity(scores, self.shape.top_k)
        bring = None if self.prefetch is None else tuple(order[: self.prefetch])
        return Forecast(visit, tuple(e for e in order if rows[e]), bring)
