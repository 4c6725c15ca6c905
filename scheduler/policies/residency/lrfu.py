"""LRFU: eviction by recency and frequency combined."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from scheduler.policies.predictors.base import Scores
from scheduler.policies.residency.lru import LRU
from scheduler.types import ExpertId, ModelShape, Visit

DECAY = 0.95
"""2^-lambda: what a reference is worth one token later. Chosen on the routes of demo-moe, deep-moe and two random
checkpoints with 8 and 64 experts a layer, with slots for a quarter of the experts. 0.95 to 0.98 has the best hit rate
on each of them, and 0.95 is at most 0.3 points below it; 0.9 is 0.5 to 1.4 points below it."""


class LRFU(LRU):
    """All experts stay; the one with the lowest combined recency and frequency value (CRF) is evicted (Lee et al.,
    "LRFU: A Spectrum of Policies that Subsumes the Least Recently Used and Least Frequently Used Policies", IEEE
    Transactions on Computers 50(12), 2001).

    The value is the sum of 2^(-lambda x) over an expert's references, x being the time since each. At a reference it
    becomes C = 1 + 2^(-lambda dt) C, with dt the time since the one before. `decay` is 2^-lambda: at 1 this is LFU, at
    0.5 and below LRU. Experts that are not in a slot have a value, too.

    Assumed: time passes by the tokens of the expert's layer, and values are compared over all layers: each is
    proportional to an estimate of how likely the layer's next token chooses the expert. A reference is a row for which
    the gate chose the expert. The rows of a pass of several tokens are spread evenly over it, since their order is not
    known. Of equal values the least recently used expert is evicted.
    """

    def __init__(self, shape: ModelShape, decay: float = DECAY) -> None:
        super().__init__(shape)
        self.decay = decay
        self._values = {layer: [0.0] * shape.count(ordinal) for ordinal, layer in enumerate(shape.layers)}
        """Layer -> the value of each expert, at the layer's last token."""

    def value(self, expert: ExpertId) -> float:
        """Combined recency and frequency, at the last token of the expert's layer."""
        return self._values[expert.layer][expert.expert]

    def on_gate_fired(self, visit: Visit, rows: Mapping[int, int], scores: Scores, prefill: bool) -> None:
        tokens = max(1, -(-sum(rows.values()) // self.shape.top_k))
        rest = self.decay**tokens
        row = sum(self.decay**age for age in range(tokens)) / tokens  # the mean over the pass; 1 for one token
        values = [value * rest for value in self._values[visit.layer]]
        for number, count in rows.items():
            values[number] += count * row
        self._values[visit.layer] = values

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        return min(evictable, key=lambda expert: (self.value(expert), self.age(expert)))
