"""AdapMoE: adaptive expert gating (IV-B), and a cache whose layers' shares follow their sensitivity (IV-C).

Its prefetching reads the next layer's gate: `scheduler.policies.baselines.mixtral_offloading.NextGate`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from scheduler.policies.predictors.base import Scores
from scheduler.policies.residency.measured_shares import MeasuredShares
from scheduler.policies.residency.shares import equal_shares
from scheduler.policies.routers import Chosen


class Skip:
    """A row skips its least experts while their weight together stays below `threshold` of the weight that all its
    chosen experts have. The best is never skipped (AdapMoE, "adaptive expert gating").

    AdapMoE skips the second of two if its part of the weight is small: the error of dropping a part 1 - a of the
    weight is about (1 - a)^2 times a layer's sensitivity. Assumed: one threshold for all layers, as in its released
    runtime, since a layer's sensitivity (the trace of a Fisher matrix) needs gradients. Of more than two experts the
    skipped parts are added. Resident experts are skipped like others.
    """

    wants_scores = True

    def __init__(self, threshold: float = 0.2) -> None:
        self.threshold = threshold
        self.exact = threshold == 0

    def route(self, chosen: Chosen, scores: Scores, resident: Collection[int]) -> Chosen:
        if self.exact or len(scores) != len(chosen):
            return chosen
        return tuple(self._row(experts, row) for experts, row in zip(chosen, scores, strict=True))

    def _row(self, chosen: tuple[int, ...], scores: Sequence[float]) -> tuple[int, ...]:
        spare = self.threshold * sum(scores[e] for e in chosen)
        ascending = sorted(reversed(chosen), key=lambda e: scores[e])
        skipped = set()
        for expert in ascending[:-1]:
            spare -= scores[expert]
            if not spare > 0:
                break
            skipped.add(expert)
        return tuple(e for e in chosen if e not in skipped)


class LayerShares(MeasuredShares):
    """AdapMoE's cache (IV-C): LRU in each layer, with shares that make demand loads fewest over all layers, found by
    dynamic programming over the layers.

    AdapMoE takes a layer's expected loads at each size from offline statistics, and all its experts for equally likely.
    Assumed here: both are measured while decoding.
    """

    def allocate(self, slots: int) -> Sequence[int]:
        return cheapest_shares([self.expected_misses(layer) for layer in self.shape.layers], slots)


def cheapest_shares(costs: Sequence[Sequence[float]], slots: int) -> list[int]:
    """Slots for each layer, at most `slots` together, such that the sum of costs[layer][its slots] is least.

    Slots that lower no cost are shared equally. A layer may have as many slots as it has costs, less one.
    """
    counts = [len(cost) - 1 for cost in costs]
    slots = min(slots, sum(counts))
    best = np.zeros(slots + 1)
    choices = []
    for cost in costs:
        total = np.full(slots + 1, np.inf)
        choice = np.zeros(slots + 1, dtype=np.int64)
        for size in range(min(len(cost) - 1, slots) + 1):
            candidate = cost[size] + best[: slots + 1 - size]
            better = candidate < total[size:]
            total[size:][better] = candidate[better]
            choice[size:][better] = size
        best = total
        choices.append(choice)
    shares, left = [], slots
    for choice in reversed(choices):
        shares.append(int(choice[left]))
        left -= shares[-1]
    shares.reverse()
    rest = equal_shares(left, [count - share for count, share in zip(counts, shares, strict=True)])
    return [share + more for share, more in zip(shares, rest, strict=True)]
