"""HOBBIT: stacked gates, loads in mixed precision, and a cache that weighs four policies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from scheduler.policies.baselines.mixtral_offloading import NextGate
from scheduler.policies.precision import FULL, INT4, Importance, suffices
from scheduler.policies.predictors.base import Forecast, Foresight, Scores
from scheduler.policies.residency.base import ResidencyBase
from scheduler.types import ExpertId, ModelShape, Visit

UNIMPORTANT = 0.6
"""T1 of HOBBIT: an expert is unimportant where better choices have more than this share of a row's weight."""


class Weights(NamedTuple):
    """What each policy counts in the priority of an expert; together 1.

    The defaults have the least miss penalty of all weights in steps of a quarter, on routes of demo-moe and with slots
    for 25 % of the experts; on fine-moe it is within 1 % of the least of nine. The penalty is the paper's: 1 for a full
    expert, 1/4 for an int4 one.
    """

    lru: float = 0.0
    lfu: float = 0.25
    lhu: float = 0.5
    fld: float = 0.25


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

    def on_gate_fired(self, visit: Visit, rows: Mapping[int, int], scores: Scores, prefill: bool) -> Iterable[Forecast]:
        self._loading.discard(visit.request)
        return ()

    def on_foreseen(self, visit: Visit, scores: Scores, resident: Collection[int], prefill: bool) -> Iterable[Forecast]:
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

    def on_request_closed(self, request: int) -> None:
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


class Multidimensional(ResidencyBase):
    """HOBBIT's cache (3.4): the expert of the lowest priority is evicted. With expert i to be loaded, expert t has

        w_lru R / T + w_lfu F / T + w_lhu H / T + w_fld (1 - ((l_t - l_i) mod L) / L)

    R: the token of its last use (LRU); F: its uses (LFU); H: those of them that needed the full form, whose misses cost
    the most ("least high precision frequently used", LHU); T: the tokens so far; l: the layers, counted from 0, of L.
    The last term is the farthest layer distance (FLD): it is least in the layer that comes round last. R, F, H and T
    are counted anew from each request's prompt on.

    Assumed: the weights (`Weights`), which the paper finds on a calibration set and does not print. One cache for both
    forms, where the paper has one for each: here every slot has room for the full form. A pass over a prompt counts as
    one token, as does each pass of several requests, and each of their prompts begins the counts anew. A use needs the
    full form if the precision asks for it, in whatever form the expert is held. Of equals the one that has been
    unneeded for longest is evicted.
    """

    def __init__(self, shape: ModelShape, weights: Weights | None = None) -> None:
        self.weights = weights or Weights()
        self._ordinal = {layer: ordinal for ordinal, layer in enumerate(shape.layers)}
        self._first = shape.layers[0]
        self._begin()

    def _begin(self) -> None:
        self._tokens = 0
        self._last: dict[ExpertId, int] = {}
        self._uses: Counter[ExpertId] = Counter()
        self._full_uses: Counter[ExpertId] = Counter()

    def on_gate_fired(self, visit: Visit, rows: Mapping[int, int], scores: Scores, prefill: bool) -> None:
        if visit.layer == self._first:
            if prefill and visit.position == 0:
                self._begin()
            self._tokens += 1

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        return True

    def on_used(self, worker: int, expert: ExpertId, hit: bool, form: str) -> None:
        self._last[expert] = self._tokens
        self._uses[expert] += 1
        self._full_uses[expert] += form == FULL

    def priority(self, expert: ExpertId, incoming: ExpertId) -> float:
        """Of an expert in a slot, if `incoming` is to be loaded."""
        layers, tokens = len(self._ordinal), max(1, self._tokens)
        counts = self._last.get(expert, 0), self._uses[expert], self._full_uses[expert]
        nearness = 1 - (self._ordinal[expert.layer] - self._ordinal[incoming.layer]) % layers / layers
        *records, distance = self.weights
        return sum(w * n for w, n in zip(records, counts, strict=True)) / tokens + distance * nearness

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        return min(evictable, key=lambda expert: self.priority(expert, incoming))
