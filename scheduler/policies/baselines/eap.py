"""Expert activation path (EAP), a baseline of Fate: the experts that most often followed this layer's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from scheduler.policies.baselines.counting import Counts, heaviest, row_counts
from scheduler.policies.predictors.base import Forecast, PredictorBase, Scores
from scheduler.types import ModelShape, Visit


class ActivationPath(PredictorBase):
    """The next layer's experts, from how often each followed the experts of this one (Lina; Fate's baseline EAP).

    For each pair of neighbouring layers it counts how often expert b of the second was chosen for a token for which
    expert a of the first was. Expected are the experts with the greatest sum of count(a, b) / count(a) over this gate's
    choice, as many as it chose. For the first layer, when a decode pass begins: those chosen most often there.

    Assumed: the tokens of one pass count as if their choices in the two layers were independent,
    rows(a) rows(b) / rows, since a gate reports rows per expert only. Counts never decay.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self._ordinal = {layer: ordinal for ordinal, layer in enumerate(shape.layers)}
        size = shape.experts
        self._follows = np.zeros((max(len(shape.layers) - 1, 0), size, size), dtype=np.float32)  # [layer, a, b]
        self._totals = np.zeros((len(shape.layers), size), dtype=np.float32)
        self._last: dict[int, tuple[Visit, Counts]] = {}  # request -> its last gate's choice

    def on_pass_begun(self, visit: Visit, tokens: int, prefill: bool) -> Iterable[Forecast]:
        expected = heaviest(self._totals[self._ordinal[visit.layer]], self.shape.top_k * tokens)
        return () if prefill or not expected else [Forecast(visit, expected)]

    def on_gate_fired(self, visit: Visit, rows: Mapping[int, int], scores: Scores, prefill: bool) -> Iterable[Forecast]:
        at = self._ordinal[visit.layer]
        counts = row_counts(rows, self.shape.experts)
        last = self._last.get(visit.request)
        if at and last is not None and last[0] == visit._replace(layer=self.shape.layers[at - 1]):
            tokens = max(1.0, float(counts.sum()) / self.shape.top_k)
            self._follows[at - 1] += np.outer(last[1], counts) / np.float32(tokens)
        self._totals[at] += counts
        self._last[visit.request] = (visit, counts)
        if at + 1 == len(self.shape.layers):
            return ()
        expected = heaviest(self._expected_rows(at, counts), len(rows))
        return [Forecast(visit._replace(layer=self.shape.layers[at + 1]), expected)] if expected else ()

    def _expected_rows(self, at: int, counts: Counts) -> Counts:
        """Rows that each expert of the next layer is expected to have, up to a factor."""
        follows = self._follows[at]
        totals = follows.sum(axis=1)
        weights = np.divide(counts, totals, out=np.zeros_like(counts), where=totals > 0)
        expected: Counts = weights @ follows
        return expected

    def on_request_closed(self, request: int) -> None:
        self._last.pop(request, None)
