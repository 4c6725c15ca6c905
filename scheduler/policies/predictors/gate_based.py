"""Predictors that read gates ahead of their time: the scores are tensors' work, what comes of them is decided here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from scheduler.errors import ConfigError
from scheduler.policies.predictors.base import Forecast, Foresight, Scores, Silent
from scheduler.policies.predictors.ranking import above_percentile, popularity, top_k
from scheduler.types import ModelShape, Visit


def limited(prefetch: int | None) -> int | None:
    """Raises ConfigError."""
    if prefetch is not None and prefetch < 1:
        raise ConfigError(f"prefetch is {prefetch}: so many experts a predictor brings; allowed: 1 and more")
    return prefetch


class NextGate(Silent):
    """The next layer's gate on this layer's gate input: its top-k are expected, the best `prefetch` of them brought, or
    of its ranking where that is more (mixtral-offloading, "speculative expert loading").

    Assumed: the top-k are brought where nobody says (that paper tries 1 and 2 for a top-2 model); of several rows, what
    most rows want comes first; nothing in prefill, where that paper loads layer by layer.
    """

    foresight: Foresight | None = "gate"

    def __init__(self, shape: ModelShape, prefetch: int | None = None) -> None:
        super().__init__(shape)
        self.prefetch = limited(prefetch)

    def foreseen(self, visit: Visit, scores: Scores, resident: Collection[int], prefill: bool) -> Iterable[Forecast]:
        return [self._forecast(visit, scores)] if scores and not prefill else ()

    def _forecast(self, visit: Visit, scores: Scores) -> Forecast:
        order, named = popularity(scores, self.shape.top_k)
        bring = None if self.prefetch is None else tuple(order[: self.prefetch])
        return Forecast(visit, tuple(e for e in order if named[e]), bring)


class CrossLayer(Silent):
    """Fate's cross-layer gate (4.2, 4.3): every expert whose score is over the 75th percentile of its row is expected.

    Decoding: of those not resident, the best floor(layer / load) are brought, as many loads as a layer's time hides, no
    limit before anything was measured. That budget is a maximum and may be 0: `least` is a minimum for those who would
    rather have a load half hidden (the paper: 0). Resident ones among the top-k are to stay. Prefill: by popularity,
    that is by how many rows have one among their top-k; those that no row has are expected, and not brought.

    Assumed: the percentile is numpy's (linear between two scores) and must be exceeded; the top-k are expected in any
    case, since of 8 experts with top-4 only two are over the percentile.
    """

    foresight: Foresight | None = "gate"

    def __init__(self, shape: ModelShape, percentile: float = 75.0, least: int = 0) -> None:
        super().__init__(shape)
        if not 0 <= percentile <= 100:
            raise ConfigError(f"cross-layer prediction: percentile is {percentile}; allowed: 0 to 100")
        if least < 0:
            raise ConfigError(f"cross-layer prediction: at least {least} loads a layer; allowed: 0 and more")
        self.percentile = percentile
        self.least = least
        self.budget: int | None = None

    def paced(self, load_s: float, layer_s: float) -> None:
        if load_s > 0 and layer_s > 0:
            self.budget = int(layer_s / load_s + 1e-9)  # 0.3 / 0.1 is 2.9999999999999996

    def foreseen(self, visit: Visit, scores: Scores, resident: Collection[int], prefill: bool) -> Iterable[Forecast]:
        if not scores:
            return ()
        order, named = popularity(scores, self.shape.top_k)
        over = above_percentile(scores, self.percentile)
        experts = tuple(e for e in order if named[e] or e in over)
        if prefill:
            return [Forecast(visit, experts, tuple(e for e in experts if named[e]))]
        return [Forecast(visit, experts, self._bring(experts, named, resident))]

    def _bring(self, experts: tuple[int, ...], named: list[int], resident: Collection[int]) -> tuple[int, ...]:
        loads = len(experts) if self.budget is None else max(self.budget, self.least)
        bring = []
        for expert in experts:
            if expert in resident:
                if named[expert]:
                    bring.append(expert)
            elif loads > 0:
                bring.append(expert)
                loads -= 1
        return tuple(bring)


class NextLayer(Silent):
    """The next layer's attention and gate on what this layer's resident and shared experts give: its top-k are brought,
    the highest score first (importance, 5.2). The core clears what is left of the queue at the gate.

    `alpha`: bring those only whose score is over (1 + alpha) times the (k+1)-th of their row, as the router would call
    them top-score; None: the whole top-k. The paper's 5.2 says top-k, its introduction top-score experts only.
    Assumed: of several rows, an expert's highest score counts, since a row's top-score expert cannot be replaced;
    nothing in prefill, where 4.1 prefetches the next layer whole.
    """

    foresight: Foresight | None = "attention"

    def __init__(self, shape: ModelShape, alpha: float | None = None) -> None:
        super().__init__(shape)
        if alpha is not None and alpha < 0:
            raise ConfigError(f"next-layer prediction: alpha is {alpha}; allowed: 0 and more")
        self.alpha = alpha

    def foreseen(self, visit: Visit, scores: Scores, resident: Collection[int], prefill: bool) -> Iterable[Forecast]:
        if prefill or not scores:
            return ()
        highest: dict[int, float] = {}
        wanted: set[int] = set()
        for row in scores:
            ranking = top_k(row, self.shape.top_k + 1)
            top = ranking[: self.shape.top_k]
            beta = row[ranking[len(top)]] if len(ranking) > len(top) else 0.0
            for expert in top:
                highest[expert] = max(row[expert], highest.get(expert, row[expert]))
                if self.alpha is None or row[expert] > (1 + self.alpha) * beta:
                    wanted.add(expert)
        experts = tuple(sorted(highest, key=lambda e: (-highest[e], e)))
        bring = None if self.alpha is None else tuple(e for e in experts if e in wanted)
        return [Forecast(visit, experts, bring)]


class Stacked(NextGate):
    """The gates of several next layers on this layer's gate input, one forecast each (HOBBIT, "stacking computer").

    Loads go to the nearest layer that lacks something of what would be brought. Behind it experts are expected, and
    those alone that are there or on their way are to stay. Assumed: the forecasts of one gate come nearest layer first;
    the rest as `NextGate`.
    """

    foresight: Foresight | None = "gates"

    def __init__(self, shape: ModelShape, prefetch: int | None = None) -> None:
        super().__init__(shape, prefetch)
        self._busy: set[int] = set()  # requests for which a nearer layer lacks something since the last gate

    def fired(self, visit: Visit, named: Mapping[int, int], scores: Scores, prefill: bool) -> Iterable[Forecast]:
        self._busy.discard(visit.request)
        return ()

    def foreseen(self, visit: Visit, scores: Scores, resident: Collection[int], prefill: bool) -> Iterable[Forecast]:
        if prefill or not scores:
            return ()
        forecast = self._forecast(visit, scores)
        wanted = forecast.experts if forecast.bring is None else forecast.bring
        here = tuple(e for e in wanted if e in resident)
        if visit.request in self._busy:
            return [forecast._replace(bring=here)]
        if len(here) < len(wanted):
            self._busy.add(visit.request)
        return [forecast]

    def closed(self, request: int) -> None:
        self._busy.discard(request)
