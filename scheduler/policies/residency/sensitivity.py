"""Shares of the slots by how sensitive each layer is to them (AdapMoE, section IV-C)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from scheduler.errors import ConfigError
from scheduler.policies.predictors.base import Scores
from scheduler.policies.residency.base import PASSING
from scheduler.policies.residency.shares import Shares, evenly
from scheduler.types import ExpertId, ModelShape, Visit

PERIOD = 32
"""After so many decode passes layers' shares are set anew, unless said."""


class LayerShares(Shares):
    """AdapMoE's cache (section IV-C): LRU in each layer, and a share for each layer such that the loads that nobody
    predicted are fewest over all layers, found by dynamic programming over them.

    AdapMoE draws a layer's expected loads at each size from offline statistics and takes all its experts for equally
    likely. Assumed here: both are measured as decoding goes. How often a use came so many experts after the last one
    says exactly what LRU would have missed at every size (stack distances: Mattson et al. 1970); that is weighed with
    the part of the layer's used loads that no prediction had begun. Shares are equal at first, and set anew every
    `period` decode passes; older counts then weigh half. `passing`: see Shares.
    """

    def __init__(self, shape: ModelShape, period: int = PERIOD, passing: int = PASSING) -> None:
        super().__init__(shape, passing)
        if period < 1:
            raise ConfigError(f"shares-period is {period}; allowed: 1, 2, ... decode passes")
        self.period = period
        self._slots = 0
        self._passes = 0
        self._recent: dict[int, list[int]] = {layer: [] for layer in shape.layers}
        self._distances = {layer: np.zeros(count + 1) for layer, count in zip(shape.layers, self.counts, strict=True)}
        self._loads = {layer: [0.0, 0.0] for layer in shape.layers}  # used: unpredicted, predicted
        self._predicted: set[ExpertId] = set()

    def shares(self, slots: int) -> Sequence[int]:
        self._slots = slots
        return self._best() if self._passes >= self.period else evenly(slots, self.counts)

    def _best(self) -> list[int]:
        return fewest([self.missed(layer) for layer in self.shape.layers], self._slots)

    def missed(self, layer: int) -> list[float]:
        """What the layer would have had to load unpredicted with 0, 1, ... slots, as measured so far."""
        late, early = self._loads[layer]
        weight = (late + 1) / (late + early + 1)
        distances = self._distances[layer]
        return [float(weight * distances[size + 1 :].sum()) for size in range(len(distances))]

    def observed(self, visit: Visit, named: Mapping[int, int], scores: Scores, prefill: bool) -> None:
        if prefill:
            return
        if visit.layer == self.shape.layers[0]:
            self._passes += 1
            if self._passes % self.period == 0:
                self._renew()
        recent = self._recent[visit.layer]
        for number in named:
            if number in recent:
                self._distances[visit.layer][recent.index(number) + 1] += 1
        self._recent[visit.layer] = [*named, *(number for number in recent if number not in named)]

    def _renew(self) -> None:
        self.set_shares(self._best())
        for layer in self.shape.layers:
            self._distances[layer] /= 2
            self._loads[layer] = [count / 2 for count in self._loads[layer]]

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        if predicted:
            self._predicted.add(expert)
        else:
            self._predicted.discard(expert)
        return super().keeps(worker, expert, predicted)

    def used(self, worker: int, expert: ExpertId, hit: bool, score: float | None) -> None:
        super().used(worker, expert, hit, score)
        if not hit:
            self._loads[expert.layer][expert in self._predicted] += 1
            self._predicted.discard(expert)


def fewest(costs: Sequence[Sequence[float]], slots: int) -> list[int]:
    """So many slots for each layer, at most `slots` together, that the sum of costs[layer][its slots] is least; what
    nobody gains by is shared evenly. A layer may have as many as it has costs, less one."""
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
    rest = evenly(left, [count - share for count, share in zip(counts, shares, strict=True)])
    return [share + more for share, more in zip(shares, rest, strict=True)]
