"""HOBBIT: stacked gates, and loads in mixed precision."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from scheduler.policies.baselines.mixtral_offloading import NextGate
from scheduler.policies.precision import FULL, INT4, Importance, suffices
from scheduler.policies.predictors.base import Forecast, Foresight, Scores
from scheduler.types import ModelShape, Visit

UNIMPORTANT = 0.6
"""T1 of HOBBIT: an expert is unimportant where better choices have more than this share of a row's weight."""


class Stacked(NextGate):
    """The gates of several next layers on this layer's gate input, one forecast each (HOBBIT, "stacking computer").

    Loads go to the nearest layer that lacks an expert to be prefetched. For layers behind it experts are expected, and
    only those in a slot or in flight are kept. Assumed: the forecasts of one gate arrive nearest layer first. The rest
    is as in `NextGate`.
    """

    foresight: Foresight | None = "gates"

    def __init__(self, shape: ModelShape, prefetch: int | None = None) -> None:
        super().__init__(shape, prefetch)
        self._loading: set[int] = set()
        """Requests for which a nearer layer has lacked an expert since their last gate."""

    def fired(self, visit: Visit, rows: Mapping[int, int], scores: Scores, prefill: bool) -> Iterable[Forecast]:
        self._loading.discard(visit.request)
        return ()

    def foreseen(self, visit: Visit, scores: Scores, resident: Collection[int], prefill: bool) -> Iterable[Forecast]:
        if prefill or not scores:
            return ()
        forecast = self._forecast(visit, scores)
        prefetched = forecast.experts if forecast.bring is None else forecast.bring
        present = tuple(e for e in prefetched if e in resident)
        if visit.request in self._loading:
            return [forecast._replace(bring=present)]
        if len(present) < len(prefetched):
            self._loading.add(visit.request)
        return [forecast]

    def closed(self, request: int) -> None:
        self._loading.discard(request)


class Mixed:
    """HOBBIT's token-level choice: int4 where the better choices have more than `UNIMPORTANT` of their row's weight,
    the full form elsewhere. A row's best expert is always full.

    Of several rows the one that needs the expert most decides. Where the weight of the better choices is unknown (the
    expert is only predicted), its rank decides: the best is full, the others are int4. An int4 expert that turns out to
    matter is loaded again.

    Assumed: the same rule in prefill and decoding. What HOBBIT skips altogether (over 0.9) is loaded as int4: skipping
    is the router's choice.
    """

    exact = False
    wants_scores = True
    forms: tuple[str, ...] = (FULL, INT4)

    def form(self, importance: Importance) -> str:
        if importance.better is None:
            return FULL if importance.rank == 0 else INT4
        return FULL if importance.better <= UNIMPORTANT else INT4

    def serves(self, held: str, importance: Importance) -> bool:
        return suffices(held, self.form(importance))
