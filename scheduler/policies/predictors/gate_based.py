"""Predictors that read gates before their layer is reached. The main model computes the scores; here they are used."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from scheduler.policies.predictors.base import Forecast, Foresight, PredictorBase, Scores
from scheduler.policies.predictors.ranking import above_percentile, popularity, top_k
from scheduler.types import ModelShape, Visit

PERCENTILE = 75.0
"""Fate 4.2: experts whose score exceeds this percentile of their row are expected."""


class CrossLayer(PredictorBase):
    """Fate's cross-layer gate (4.2, 4.3): every expert whose score exceeds the 75th percentile of its row is expected.

    Decoding: the best floor(layer / load) that are not resident are prefetched, as many loads as a layer's time hides.
    There is no limit before anything was measured, and the limit may be 0. Resident experts of the top-k stay. Prefill:
    the most popular first, by how many rows have an expert in their top-k; experts that no row has there are expected
    but not prefetched.

    Assumed: the percentile is numpy's (linear between two scores). The top-k are always expected: of 8 experts with
    top-4 only two exceed the percentile.
    """

    foresight: Foresight | None = "gate"

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self.budget: int | None = None
        """Loads that a layer's time hides; None before anything was measured."""

    def on_paced(self, load_s: float, layer_s: float) -> None:
        if load_s > 0 and layer_s > 0:
            self.budget = int(layer_s / load_s + 1e-9)  # 0.3 / 0.1 is 2.9999999999999996

    def on_foreseen(self, visit: Visit, scores: Scores, resident: Collection[int], prefill: bool) -> Iterable[Forecast]:
        if not scores:
            return ()
        order, rows = popularity(scores, self.shape.top_k)
        above = above_percentile(scores, PERCENTILE)
        experts = tuple(e for e in order if rows[e] or e in above)
        if prefill:
            return [Forecast(visit, experts, tuple(e for e in experts if rows[e]))]
        return [Forecast(visit, experts, self._bring(experts, rows, resident))]

    def _bring(self, experts: tuple[int, ...], rows: list[int], resident: Collection[int]) -> tuple[int, ...]:
        loads = len(experts) if self.budget is None else self.budget
        bring = []
        for expert in experts:
            if expert in resident:
                if rows[expert]:
                    bring.append(expert)
            elif loads > 0:
                bring.append(expert)
                loads -= 1
        return tuple(bring)


class NextLayer(PredictorBase):
    """The next layer's attention and gate on the output of this layer's resident and shared experts (importance 5.2).

    The top-k are prefetched, the highest score first. The core drops queued loads at the gate. With `alpha`, only
    experts whose score exceeds (1 + alpha) times the (k+1)-th of their row are prefetched: those that the router calls
    top-score. Section 5.2 says top-k, the paper's introduction top-score experts only.

    Assumed: of several rows an expert's highest score counts, since a row's top-score expert cannot be replaced.
    Nothing is predicted in prefill, where section 4.1 prefetches the whole next layer.
    """

    foresight: Foresight | None = "attention"

    def __init__(self, shape: ModelShape, alpha: float | None = None) -> None:
        super().__init__(shape)
        self.alpha = alpha

    def on_foreseen(self, visit: Visit, scores: Scores, resident: Collection[int], prefill: bool) -> Iterable[Forecast]:
        if prefill or not scores:
            return ()
        highest: dict[int, float] = {}
        top_score: set[int] = set()
        for row in scores:
            ranking = top_k(row, self.shape.top_k + 1)
            top = ranking[: self.shape.top_k]
            beta = row[ranking[len(top)]] if len(ranking) > len(top) else 0.0
            for expert in top:
                highest[expert] = max(row[expert], highest.get(expert, row[expert]))
                if self.alpha is None or row[expert] > (1 + self.alpha) * beta:
                    top_score.add(expert)
        experts = tuple(sorted(highest, key=lambda e: (-highest[e], e)))
        bring = None if self.alpha is None else tuple(e for e in experts if e in top_score)
        return [Forecast(visit, experts, bring)]
