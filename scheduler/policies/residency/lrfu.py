"""LRFU: eviction by recency and frequency combined."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from scheduler.policies.predictors.base import Scores
from scheduler.policies.residency.shares import Shares
from scheduler.types import ExpertId, ModelShape, Visit

DECAY = 0.9
"""What a reference is worth one token later: 2^-lambda."""


class LRFU(Shares):
    """Equal shares of the slots for each layer; evicts the expert with the least combined recency and frequency value
    (Lee et al., "LRFU: A Spectrum of Policies that Subsumes the Least Recently Used and Least Frequently Used
    Policies", IEEE Transactions on Computers 50(12), 2001).

    An expert's value at a time is the sum of 2^(-lambda x) over its references, x being the time since each: after a
    reference it is C = 1 + 2^(-lambda dt) C_old, dt being the time since the one before (the paper's equation of
    Property 2). `decay` is 2^-lambda. Near 0 the order of eviction is LRU's; at 1 it is LFU's. Values are kept for
    experts that are not in a slot, too.

    Assumed: time is counted in tokens of the layer, so that layers and requests of different length compare. A
    reference is a row: of a pass of several rows it is not known which token chose an expert, so the rows of each
    expert are spread evenly over the pass. Of equal values the least recently used expert is evicted.
    """

    def __init__(self, shape: ModelShape, decay: float = DECAY) -> None:
        super().__init__(shape)
        self.decay = decay
        self._values: dict[int, dict[int, float]] = {layer: {} for layer in shape.layers}
        """Layer -> expert -> its value at the layer's last visit."""

    def value(self, expert: ExpertId) -> float:
        """Combined recency and frequency at the layer's last visit; 0 where no gate has chosen the expert yet."""
        return self._values[expert.layer].get(expert.expert, 0.0)

    def observed(self, visit: Visit, rows: Mapping[int, int], scores: Scores, prefill: bool) -> None:
        values = self._values[visit.layer]
        tokens = max(1, -(-sum(rows.values()) // self.shape.top_k))
        kept = self.decay**tokens
        # A row is worth the mean of decay^0 ... decay^(tokens - 1): of one token that is 1.
        worth = sum(self.decay**age for age in range(tokens)) / tokens
        for number in values:
            values[number] *= kept
        for number, count in rows.items():
            values[number] = values.get(number, 0.0) + count * worth

    def weakest(self, layer: int, incoming: ExpertId, among: Collection[ExpertId]) -> ExpertId | None:
        return min(among, key=lambda expert: (self.value(expert), self.age(expert)))
