"""Shares of the layers that follow the demand loads which they would save, measured while decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scheduler.policies.predictors.base import Scores
from scheduler.policies.residency.shares import Shares, equal_shares
from scheduler.types import ExpertId, ModelShape, Visit

PERIOD = 32
"""Decode passes between two allocations of the layers' shares. Assumed."""


class MeasuredShares(Shares):
    """Shares are equal at first and allocated again every `PERIOD` decode passes; older counts then weigh half.

    The stack distance of a use (Mattson et al. 1970) tells what LRU would have missed at every size; misses are weighed
    with the part of the layer's used loads that were not prefetched.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self._slots = 0
        self._passes = 0
        self._recent: dict[int, list[int]] = {layer: [] for layer in shape.layers}  # the last used first
        self._distances = {layer: [0.0] * (count + 1) for layer, count in zip(shape.layers, self.counts, strict=True)}
        self._loads = {layer: [0.0, 0.0] for layer in shape.layers}
        """Layer -> used loads: on demand, prefetched."""
        self._prefetched: set[ExpertId] = set()

    def initial(self, slots: int) -> Sequence[int]:
        """Before anything was measured."""
        return equal_shares(slots, self.counts)

    def allocate(self, slots: int) -> Sequence[int]:
        """The layers' shares by `expected_misses`."""
        raise NotImplementedError

    def shares(self, slots: int) -> Sequence[int]:
        self._slots = slots
        return self.allocate(slots) if self._passes >= PERIOD else self.initial(slots)

    def expected_misses(self, layer: int) -> list[float]:
        """Demand loads that the layer would have had with 0, 1, ... slots, as measured so far."""
        demand, prefetched = self._loads[layer]
        weight = (demand + 1) / (demand + prefetched + 1)
        misses, beyond = [], sum(self._distances[layer])
        for uses in self._distances[layer]:
            beyond -= uses
            misses.append(weight * beyond)
        return misses

    def on_gate_fired(self, visit: Visit, rows: Mapping[int, int], scores: Scores, prefill: bool) -> None:
        if prefill:
            return
        if visit.layer == self.shape.layers[0]:
            self._passes += 1
            if self._passes % PERIOD == 0:
                self._reallocate()
        recent = self._recent[visit.layer]
        for number in rows:
            if number in recent:
                self._distances[visit.layer][recent.index(number) + 1] += 1
        self._recent[visit.layer] = [*rows, *(number for number in recent if number not in rows)]

    def _reallocate(self) -> None:
        self.set_shares(self.shares(self._slots))
        for layer in self.shape.layers:
            self._distances[layer] = [count / 2 for count in self._distances[layer]]
            self._loads[layer] = [count / 2 for count in self._loads[layer]]

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        if predicted:
            self._prefetched.add(expert)
        else:
            self._prefetched.discard(expert)
        return super().keeps(worker, expert, predicted)

    def on_used(self, worker: int, expert: ExpertId, hit: bool, form: str) -> None:
        super().on_used(worker, expert, hit, form)
        if not hit:
            self._loads[expert.layer][expert in self._prefetched] += 1
            self._prefetched.discard(expert)
