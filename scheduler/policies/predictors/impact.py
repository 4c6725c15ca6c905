"""HybriMoE's prefetching: of several next layers, what is worth most is brought first."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from scheduler.policies.predictors.base import Forecast, Foresight, Scores, Silent
from scheduler.policies.predictors.gate_based import limited
from scheduler.policies.predictors.ranking import popularity
from scheduler.types import ModelShape, Visit


class Impact(Silent):
    """The gates of several next layers on this layer's gate input; each expert that is not resident is weighed by what
    bringing it is expected to save (HybriMoE, "impact-driven prefetching").

    Expected benefit, in seconds: how likely the gate is to name it, times how many rows want it, times the part of its
    load that is over before its layer begins. How likely is measured as it goes, by how many layers ahead and by its
    place in the forecast. Loads for which nothing would be hidden are not begun; `prefetch`: the most that one gate
    begins, for all layers that it looks ahead to.

    Assumed: HybriMoE finds the benefit by simulating its schedule on processor and device with and without the expert;
    here it is the loading time that is hidden, since a predictor is told no costs of computing. Layers are served in
    the order in which their forecasts come, the nearest first, and share one queue of loads until the next gate.
    """

    foresight: Foresight | None = "gates"

    def __init__(self, shape: ModelShape, prefetch: int | None = None) -> None:
        super().__init__(shape)
        self.prefetch = limited(prefetch)
        self._ordinal = {layer: ordinal for ordinal, layer in enumerate(shape.layers)}
        self._pace: tuple[float, float] | None = None
        self._at: dict[int, tuple[int, int]] = {}  # request -> layer (ordinal) of its last gate, loads begun since
        self._forecasts: dict[int, dict[Visit, list[tuple[int, tuple[int, ...]]]]] = {}
        self._right: dict[tuple[int, int], tuple[int, int]] = {}  # (layers ahead, place) -> (right, said)

    def paced(self, load_s: float, layer_s: float) -> None:
        if load_s > 0 and layer_s > 0:
            self._pace = (load_s, layer_s)

    def likely(self, ahead: int, place: int) -> float:
        """The part of what was said so far, so many layers ahead and at that place of the forecast, that was right,
        one right one counted in beforehand."""
        right, counted = self._right.get((ahead, place), (0, 0))
        return (right + 1) / (counted + 1)

    def fired(self, visit: Visit, named: Mapping[int, int], scores: Scores, prefill: bool) -> Iterable[Forecast]:
        self._at[visit.request] = (self._ordinal[visit.layer], 0)
        for ahead, experts in self._forecasts.get(visit.request, {}).pop(visit, ()):
            for place, expert in enumerate(experts):
                right, counted = self._right.get((ahead, place), (0, 0))
                self._right[ahead, place] = (right + (expert in named), counted + 1)
        return ()

    def foreseen(self, visit: Visit, scores: Scores, resident: Collection[int], prefill: bool) -> Iterable[Forecast]:
        if not scores or visit.request not in self._at:
            return ()
        at, queued = self._at[visit.request]
        ahead = self._ordinal[visit.layer] - at
        order, rows = popularity(scores, self.shape.top_k)
        experts = tuple(e for e in order if rows[e])
        if not prefill:
            self._forecasts.setdefault(visit.request, {}).setdefault(visit, []).append((ahead, experts))
        wanted = {e: rows[e] * (1.0 if prefill else self.likely(ahead, place)) for place, e in enumerate(experts)}
        bring = [e for e in experts if e in resident]
        for expert in sorted((e for e in experts if e not in resident), key=lambda e: -wanted[e]):
            if self.prefetch is not None and queued >= self.prefetch:
                break
            if wanted[expert] * self._hidden(ahead, queued) > 0:
                bring.append(expert)
                queued += 1
        self._at[visit.request] = (at, queued)
        return [Forecast(visit, experts, tuple(bring))]

    def _hidden(self, ahead: int, queued: int) -> float:
        """Seconds of a load that are over before a layer begins, where so many loads are before it in the queue."""
        if self._pace is None:
            return 1.0
        load_s, layer_s = self._pace
        return min(load_s, max(0.0, ahead * layer_s - queued * load_s))

    def closed(self, request: int) -> None:
        self._at.pop(request, None)
        self._forecasts.pop(request, None)
