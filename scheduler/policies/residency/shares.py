"""Residencies that give each layer a share of the slots."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from scheduler.policies.residency.base import kept_slots
from scheduler.policies.residency.lru import LRU
from scheduler.types import ExpertId, ModelShape


class Shares(LRU):
    """Each layer has its own share of the slots, and evicts its least recently used (mixtral-offloading, section 3.1).
    Also the base class of other residencies with shares.

    Shares are over all workers together, less the `PASSING_SLOTS`. An expert that its layer's share has no room for is
    loaded all the same, and evicted once it is computed. So shares are never exceeded, and when they shrink, the
    following loads bring the layers down to them.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self.counts = [shape.count(ordinal) for ordinal in range(len(shape.layers))]
        self.share: dict[int, int] = dict.fromkeys(shape.layers, 0)
        self.kept: dict[int, set[ExpertId]] = {layer: set() for layer in shape.layers}
        self._workers: set[int] = set()

    def shares(self, slots: int) -> Sequence[int]:
        """How many of `slots` each layer gets, in the order of the layers. Equal shares unless overridden."""
        return equal_shares(slots, self.counts)

    def weakest(self, layer: int, incoming: ExpertId, among: Collection[ExpertId]) -> ExpertId | None:
        """Which of `among` (not empty; all of `layer`) is evicted for `incoming`."""
        return min(among, key=self.age)

    def check(self, shape: ModelShape, slots: int) -> None:
        self.set_shares(self.shares(kept_slots(shape, slots)))

    def set_shares(self, shares: Sequence[int]) -> None:
        self.share = dict(zip(self.shape.layers, shares, strict=True))

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        self._workers.add(worker)
        self._touch(expert)
        stays = expert in self.kept[expert.layer] or not self.full(expert)
        if stays:
            self.kept[expert.layer].add(expert)
        return stays

    def on_left(self, worker: int, expert: ExpertId) -> None:
        self.kept[expert.layer].discard(expert)

    def full(self, incoming: ExpertId) -> bool:
        return len(self.kept[incoming.layer]) >= self.share[incoming.layer]

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        own = [expert for expert in evictable if expert.layer == incoming.layer]
        if own and self.full(incoming):
            return self.weakest(incoming.layer, incoming, own)
        over = [expert for expert in evictable if len(self.kept[expert.layer]) > self.share[expert.layer]]
        if over:
            layer = max(over, key=lambda expert: len(self.kept[expert.layer]) - self.share[expert.layer]).layer
            return self.weakest(layer, incoming, [expert for expert in over if expert.layer == layer])
        if self.full(incoming) or len(self._workers) < 2:
            return None  # a passing slot comes free
        layer = incoming.layer if own else min(evictable, key=self.age).layer  # this worker's slots may hold no other
        return self.weakest(layer, incoming, [expert for expert in evictable if expert.layer == layer])


def equal_shares(slots: int, counts: Sequence[int]) -> list[int]:
    """`slots` in equal shares, none above its count. A remainder goes to the first ones."""
    shares = [0] * len(counts)
    left = min(slots, sum(counts))
    while left:
        open_ = [i for i, count in enumerate(counts) if shares[i] < count]
        each, rest = divmod(left, len(open_))
        for place, i in enumerate(open_):
            more = min(each or place < rest, counts[i] - shares[i])
            shares[i] += more
            left -= more
    return shares
