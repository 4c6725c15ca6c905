"""SMOE's token-wise prediction: a layer's experts for the next token, from this token's activation in that layer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from scheduler.errors import ConfigError
from scheduler.policies.predictors.base import Forecast, Foresight, Scores, Silent
from scheduler.policies.predictors.gate_based import limited
from scheduler.policies.predictors.ranking import popularity
from scheduler.types import ModelShape, Visit


class TokenWise(Silent):
    """A small network of a layer says what the next token will want of that layer, a whole pass ahead (SMOE, IV-D).

    The top-k are expected. Brought are `prefetch` experts that are not resident, N of IV-E: down the ranking until
    there are N of them (fixed-N), or, `adaptive`, those among the top N. `flex`: once `warm_up` predictions of every
    layer were compared with what came, that half of the layers (rounded down) that was right least often brings nothing
    any more.

    Assumed: N is the top-k where nobody says (the paper finds 2 best, 3 with flex, of top-8); resident ones are not
    held back from eviction, since there the least frequent goes, predicted or not; half the layers is settled once, and
    of layers as often right the shallower stop; nothing in prefill.
    """

    foresight: Foresight | None = "token"

    def __init__(
        self,
        shape: ModelShape,
        prefetch: int | None = None,
        adaptive: bool = False,
        flex: bool = False,
        warm_up: int = 16,
    ) -> None:
        super().__init__(shape)
        if warm_up < 1:
            raise ConfigError(f"token-wise prediction: warm-up is {warm_up} tokens; allowed: 1 and more")
        self.prefetch = limited(prefetch) or shape.top_k
        self.adaptive = adaptive
        self.flex = flex
        self.warm_up = warm_up
        self.silent: frozenset[int] | None = None
        """With `flex`: the layers that bring nothing; None as long as it is not settled."""
        self._forecasts: dict[int, dict[int, Forecast]] = {}  # request -> layer -> what is not compared yet
        self._right: dict[int, tuple[int, int, int]] = dict.fromkeys(shape.layers, (0, 0, 0))

    def accuracy(self, layer: int) -> float | None:
        """The part of what the gate named that was expected (recall). None: nothing to compare so far."""
        right, named, _ = self._right[layer]
        return right / named if named else None

    def fired(self, visit: Visit, named: Mapping[int, int], scores: Scores, prefill: bool) -> Iterable[Forecast]:
        forecast = self._forecasts.get(visit.request, {}).pop(visit.layer, None)
        if forecast is not None and forecast.visit == visit and not prefill:
            right, total, compared = self._right[visit.layer]
            hit = sum(expert in forecast.experts for expert in named)
            self._right[visit.layer] = (right + hit, total + len(named), compared + 1)
            if self.flex and self.silent is None:
                self._settle()
        return ()

    def _settle(self) -> None:
        if any(compared < self.warm_up for _, _, compared in self._right.values()):
            return
        worst = sorted(self.shape.layers, key=lambda layer: (self.accuracy(layer) or 0.0, layer))
        self.silent = frozenset(worst[: len(worst) // 2])

    def foreseen(self, visit: Visit, scores: Scores, resident: Collection[int], prefill: bool) -> Iterable[Forecast]:
        if prefill or not scores:
            return ()
        order, named = popularity(scores, self.shape.top_k)
        experts = tuple(e for e in order if named[e])
        forecast = Forecast(visit, experts, self._bring(visit.layer, order, resident))
        self._forecasts.setdefault(visit.request, {})[visit.layer] = forecast
        return [forecast]

    def _bring(self, layer: int, order: list[int], resident: Collection[int]) -> tuple[int, ...]:
        if self.silent is not None and layer in self.silent:
            return ()
        if self.adaptive:
            return tuple(e for e in order[: self.prefetch] if e not in resident)
        return tuple([e for e in order if e not in resident][: self.prefetch])

    def closed(self, request: int) -> None:
        self._forecasts.pop(request, None)
