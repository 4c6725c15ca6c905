"""Least-Stale: what the pass in progress has not used goes before what it has."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from scheduler.policies.predictors.base import Scores
from scheduler.policies.residency.lru import LRU
from scheduler.types import ExpertId, ModelShape, Visit


class LeastStale(LRU):
    """All experts stay; a *stale* one, which the current forward pass has neither chosen nor loaded, is evicted before
    a current one. Of both kinds those go first whose layer the pass has behind it, which is not visited again in this
    pass: first in, first out (Hoang, Jaiswal, Samragh, Cho: "SpecMD", arXiv 2602.03921).

    Assumed, since the paper's abstract and others' descriptions were to hand, not its text: layers behind are those up
    to the current gate's, in the order in which the pass came by; of the layers ahead the farthest goes first; within
    a layer, the longest unused. The passes of a step are one.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self._pass = 0
        self._requests: set[int] = set()  # of the passes of this step
        self._layer = -1
        self._current: dict[ExpertId, int] = {}  # expert -> the last pass that chose or loaded it

    def on_gate_fired(self, visit: Visit, rows: Mapping[int, int], scores: Scores, prefill: bool) -> None:
        if visit.layer == self.shape.layers[0]:
            if visit.request in self._requests:
                self._requests.clear()
            if not self._requests:
                self._pass += 1
            self._requests.add(visit.request)
        self._layer = visit.layer
        for number in rows:
            self._current[ExpertId(visit.layer, number)] = self._pass

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        self._current[expert] = self._pass
        return super().keeps(worker, expert, predicted)

    def _order(self, expert: ExpertId) -> tuple[bool, bool, int, int]:
        ahead = expert.layer > self._layer
        is_current = self._current.get(expert, 0) == self._pass
        return is_current, ahead, -expert.layer if ahead else expert.layer, self.age(expert)

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        return min(evictable, key=self._order)
