"""Adaptive Replacement Cache (Megiddo and Modha, FAST 2003), and two residencies that use it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from typing import Generic, TypeVar

from scheduler.policies.residency.base import ResidencyBase, kept_slots
from scheduler.policies.residency.measured_shares import MeasuredShares
from scheduler.policies.residency.shares import equal_shares
from scheduler.types import ExpertId, ModelShape

K = TypeVar("K", bound=Hashable)


class AdaptiveReplacement(Generic[K]):
    """ARC(c) of FAST 2003, Fig. 4, for any keys. The caller decides when a key enters and leaves, and which may leave.

    A prefetched key (`add` with `referenced` false) is in t1, but counts as used from its first use on: then it goes
    where a miss would have gone. A key that leaves before that is not remembered. (As ZFS does.)
    """

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self.p = 0.0
        """Target size of t1."""
        # The four lists, least recently used first.
        self.t1: OrderedDict[K, None] = OrderedDict()  # in the cache, used once lately
        self.t2: OrderedDict[K, None] = OrderedDict()  # in the cache, used more often
        self.b1: OrderedDict[K, None] = OrderedDict()  # evicted from t1, remembered
        self.b2: OrderedDict[K, None] = OrderedDict()  # evicted from t2, remembered
        self._fresh: set[K] = set()
        self._planned: tuple[K, float] | None = None  # the key of the last `choose`, and how far it moves p

    def __len__(self) -> int:
        return len(self.t1) + len(self.t2)

    def __contains__(self, key: object) -> bool:
        return key in self.t1 or key in self.t2

    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        self.p = min(self.p, float(capacity))
        self._trim()

    def choose(self, incoming: K, among: Collection[K]) -> K | None:
        """REPLACE: which of `among` is evicted for `incoming`. None: none of them is in the cache. Nothing changes."""
        step = self._step(incoming)
        self._planned = incoming, step
        aim, size = self._aim(step), len(self.t1)
        from_t1 = size > aim or (incoming in self.b2 and size == aim)
        for queue in (self.t1, self.t2) if from_t1 else (self.t2, self.t1):
            for key in queue:
                if key in among:
                    return key
        return None

    def add(self, key: K, referenced: bool = True) -> None:
        """The key enters the cache: after a miss, or (not `referenced`) as a prefetch."""
        if key in self:
            if referenced:
                self.use(key)
        elif referenced:
            self._admit(key)
        else:
            self.t1[key] = None
            self._fresh.add(key)
        self._trim()

    def use(self, key: K) -> None:
        """A hit. A key that is not in the cache is ignored."""
        if key in self._fresh:
            self._fresh.remove(key)
            del self.t1[key]
            self._admit(key)
            self._trim()
        elif key in self.t1:
            del self.t1[key]
            self.t2[key] = None
        elif key in self.t2:
            self.t2.move_to_end(key)

    def remove(self, key: K) -> None:
        """The key has left the cache, and is remembered. A key that was not in the cache is ignored."""
        if key in self._fresh:
            self._fresh.remove(key)
            del self.t1[key]
        elif key in self.t1:
            del self.t1[key]
            self.b1[key] = None
        elif key in self.t2:
            del self.t2[key]
            self.b2[key] = None

    def is_fresh(self, key: K) -> bool:
        """In the cache, and never used."""
        return key in self._fresh

    def _step(self, key: K) -> float:
        """How far a miss of this key moves p. Sizes are those before the eviction for it."""
        if key in self.b1:
            return max(1.0, len(self.b2) / len(self.b1))
        if key in self.b2:
            return -max(1.0, len(self.b1) / len(self.b2))
        return 0.0

    def _aim(self, step: float) -> float:
        return min(max(self.p + step, 0.0), float(self.capacity))

    def _admit(self, key: K) -> None:
        planned, self._planned = self._planned, None
        step = planned[1] if planned is not None and planned[0] == key else self._step(key)
        if key in self.b1 or key in self.b2:
            self.p = self._aim(step)
            self.b1.pop(key, None)
            self.b2.pop(key, None)
            self.t2[key] = None
        else:
            self.t1[key] = None

    def _trim(self) -> None:
        """At most c keys in t1 and b1 together, at most 2 c in all four lists."""
        while self.b1 and len(self.t1) + len(self.b1) > self.capacity:
            self.b1.popitem(last=False)
        while self.b2 and len(self) + len(self.b1) + len(self.b2) > 2 * self.capacity:
            self.b2.popitem(last=False)
        while self.b1 and len(self) + len(self.b1) > 2 * self.capacity:
            self.b1.popitem(last=False)


class ARC(ResidencyBase):
    """All experts stay; ARC over the experts of all layers chooses which is evicted. A use is a gate that chooses the
    expert."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self.lists: AdaptiveReplacement[ExpertId] = AdaptiveReplacement()

    def check(self, shape: ModelShape, slots: int) -> None:
        self.lists.resize(slots)

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        self.lists.add(expert, referenced=not predicted)
        return True

    def on_used(self, worker: int, expert: ExpertId, hit: bool, form: str) -> None:
        if hit or self.lists.is_fresh(expert):
            self.lists.use(expert)

    def on_left(self, worker: int, expert: ExpertId) -> None:
        self.lists.remove(expert)

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        chosen = self.lists.choose(incoming, evictable)
        return chosen if chosen is not None else next(iter(evictable))


class ShallowARC(MeasuredShares):
    """Fate's cache (4.4): the first layers are cached whole, in their order as far as the slots go. The others share
    the rest equally. Each layer evicts by ARC. A layer without a share keeps no expert.

    The paper sets the boundary "based on offline statistical analysis" of each layer's prefetch accuracy, and names
    that of one model, layers 0 to 3 of Qwen1.5-MoE's 24. Assumed: the boundary is where the demand loads of all layers
    are expected to be fewest, of equal ones the lowest. They follow from the accuracy (the part of the loads that were
    not prefetched) and from the budget (the misses of each layer's share), so no whole layer starves the rest. Both
    are measured while decoding; the boundary is 0 before, and set again every `PERIOD` passes.

    If some layer's share would not hold a token's experts, slots for two tokens' experts are in no share: this
    layer's, and those that are prefetched for the next one.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self.lists: dict[int, AdaptiveReplacement[ExpertId]] = {layer: AdaptiveReplacement() for layer in shape.layers}
        self._all_slots = 0

    def check(self, shape: ModelShape, slots: int) -> None:
        self._all_slots = slots
        super().check(shape, slots)

    def initial(self, slots: int) -> Sequence[int]:
        return self.bounded(0)

    def allocate(self, slots: int) -> Sequence[int]:
        misses = [self.expected_misses(layer) for layer in self.shape.layers]
        candidates = [self.bounded(boundary) for boundary in range(len(self.counts) + 1)]
        return min(candidates, key=lambda shares: sum(of[size] for of, size in zip(misses, shares, strict=True)))

    def bounded(self, boundary: int) -> list[int]:
        """Shares with the first `boundary` layers whole, as far as the slots go."""
        shares = self._whole(boundary, kept_slots(self.shape, self._all_slots))
        if all(share >= self.shape.top_k for share in shares):
            return shares
        return self._whole(boundary, kept_slots(self.shape, self._all_slots, 2 * self.shape.top_k))

    def _whole(self, boundary: int, slots: int) -> list[int]:
        shares = []
        for count in self.counts[:boundary]:
            shares.append(min(count, slots))
            slots -= shares[-1]
        return shares + equal_shares(slots, self.counts[boundary:])

    def set_shares(self, shares: Sequence[int]) -> None:
        super().set_shares(shares)
        for layer, share in self.share.items():
            self.lists[layer].resize(share)

    def weakest(self, layer: int, incoming: ExpertId, among: Collection[ExpertId]) -> ExpertId | None:
        chosen = self.lists[layer].choose(incoming, among)
        return chosen if chosen is not None else next(iter(among))

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        stays = super().keeps(worker, expert, predicted)
        if stays:
            self.lists[expert.layer].add(expert, referenced=not predicted)
        return stays

    def on_used(self, worker: int, expert: ExpertId, hit: bool, form: str) -> None:
        super().on_used(worker, expert, hit, form)
        lists = self.lists[expert.layer]
        if hit or lists.is_fresh(expert):
            lists.use(expert)

    def on_left(self, worker: int, expert: ExpertId) -> None:
        super().on_left(worker, expert)
        self.lists[expert.layer].remove(expert)
