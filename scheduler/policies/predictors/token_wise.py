"""SMOE's token-wise prediction: a layer's experts for the next token, from this token's activation in that layer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from scheduler.policies.predictors.base import Forecast, Foresight, PredictorBase, Scores
from scheduler.policies.predictors.ranking import popularity
from scheduler.types import ModelShape, Visit

WARM_UP = 16
"""SMOE-Flex (IV-E) compares so many predictions of each layer before it silences layers. The paper leaves it open."""


class TokenWise(PredictorBase):
    """A small network per layer predicts the next token's experts in that layer, a whole pass ahead (SMOE IV-D).

    The top-k are expected. `prefetch` experts that are not resident are prefetched, the N of IV-E: the first N of the
    ranking that are not resident (fixed-N), or, `adaptive`, those among the top N. `flex`: once `WARM_UP` predictions
    of every layer have been compared, the half of the layers (rounded down) with the lowest recall prefetches no more.

    Assumed: N is the top-k unless given (the paper finds 2 best, 3 with flex, of top-8). Resident experts are not
    shielded from eviction: SMOE evicts the least frequent one, predicted or not. The silent half is chosen once; of
    layers with equal recall the shallower fall silent. Nothing is predicted in prefill.
    """

    foresight: Foresight | None = "token"

    def __init__(
        self, shape: ModelShape, prefetch: int | None = None, adaptive: bool = False, flex: bool = False
    ) -> None:
        super().__init__(shape)
        self.prefetch = prefetch or shape.top_k
        self.adaptive = adaptive
        self.flex = flex
        self.silent: frozenset[int] | None = None
        """With `flex`: the layers that prefetch nothing. None until they are chosen."""
        self._forecasts: dict[int, dict[int, Forecast]] = {}  # request -> layer -> forecast, not compared yet
        self._compared: dict[int, tuple[int, int, int]] = dict.fromkeys(shape.layers, (0, 0, 0))
        """Layer -> (experts predicted rightly, experts activated, predictions compared)."""

    def accuracy(self, layer: int) -> float | None:
        """The layer's recall: predicted rightly over activated. None: nothing compared so far."""
        right, activated, _ = self._compared[layer]
        return right / activated if activated else None

    def on_gate_fired(self, visit: Visit, rows: Mapping[int, int], scores: Scores, prefill: bool) -> Iterable[Forecast]:
        forecast = self._forecasts.get(visit.request, {}).pop(visit.layer, None)
        if forecast is not None and forecast.visit == visit and not prefill:
            right, activated, predictions = self._compared[visit.layer]
            hits = sum(expert in forecast.experts for expert in rows)
            self._compared[visit.layer] = (right + hits, activated + len(rows), predictions + 1)
            if self.flex and self.silent is None:
                self._choose_silent()
        return ()

    def _choose_silent(self) -> None:
        if any(predictions < WARM_UP for _, _, predictions in self._compared.values()):
            return
        worst = sorted(self.shape.layers, key=lambda layer: (self.accuracy(layer) or 0.0, layer))
        self.silent = frozenset(worst[: len(worst) // 2])

    def on_foreseen(self, visit: Visit, scores: Scores, resident: Collection[int], prefill: bool) -> Iterable[Forecast]:
        if prefill or not scores:
            return ()
        order, rows = popularity(scores, self.shape.top_k)
        experts = tuple(e for e in order if rows[e])
        forecast = Forecast(visit, experts, self._bring(visit.layer, order, resident))
        self._forecasts.setdefault(visit.request, {})[visit.layer] = forecast
        return [forecast]

    def _bring(self, layer: int, order: list[int], resident: Collection[int]) -> tuple[int, ...]:
        if self.silent is not None and layer in self.silent:
            return ()
        if self.adaptive:
            return tuple(e for e in order[: self.prefetch] if e not in resident)
        return tuple([e for e in order if e not in resident][: self.prefetch])

    def on_request_closed(self, request: int) -> None:
        self._forecasts.pop(request, None)
