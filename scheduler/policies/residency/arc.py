"""Adaptive Replacement Cache (Megiddo and Modha, FAST 2003), and two residencies that use it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from typing import Generic, TypeVar

from scheduler.errors import ConfigError
from scheduler.policies.residency.base import PASSING, Cacheless, kept_slots
from scheduler.policies.residency.shares import Shares, evenly
from scheduler.types import ExpertId, ModelShape

K = TypeVar("K", bound=Hashable)


class AdaptiveReplacement(Generic[K]):
    """ARC(c) of FAST 2003, Fig. 4, for any keys; here others say when a key comes and goes, and who may go.

    `t1`: in the cache, used once lately; `t2`: in the cache, used more often; `b1`, `b2`: left from there, remembered.
    `p`: the size at which t1 is aimed. All lists begin with the least recently used.

    What is fetched without being asked for (`add` with `referenced` false) stands in t1, but is known as used only by
    its first use: then it goes where a miss would have gone. Who leaves before that is not remembered. (As ZFS does.)
    """

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self.p = 0.0
        self._t1: OrderedDict[K, None] = OrderedDict()
        self._t2: OrderedDict[K, None] = OrderedDict()
        self._b1: OrderedDict[K, None] = OrderedDict()
        self._b2: OrderedDict[K, None] = OrderedDict()
        self._fresh: set[K] = set()
        self._planned: tuple[K, float] | None = None

    @property
    def t1(self) -> list[K]:
        return list(self._t1)

    @property
    def t2(self) -> list[K]:
        return list(self._t2)

    @property
    def b1(self) -> list[K]:
        return list(self._b1)

    @property
    def b2(self) -> list[K]:
        return list(self._b2)

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)

    def __contains__(self, key: object) -> bool:
        return key in self._t1 or key in self._t2

    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        self.p = min(self.p, float(capacity))
        self._trim()

    def choose(self, incoming: K, among: Collection[K]) -> K | None:
        """REPLACE: who of `among` makes room for `incoming`; None where none is in the cache. Nothing changes."""
        step = self._step(incoming)
        self._planned = incoming, step
        aim, size = self._aim(step), len(self._t1)
        from_t1 = size > aim or (incoming in self._b2 and size == aim)
        for queue in (self._t1, self._t2) if from_t1 else (self._t2, self._t1):
            for key in queue:
                if key in among:
                    return key
        return None

    def add(self, key: K, referenced: bool = True) -> None:
        """It comes into the cache: because it was asked for, or (not `referenced`) because it may be."""
        if key in self:
            if referenced:
                self.use(key)
        elif referenced:
            self._admit(key)
        else:
            self._t1[key] = None
            self._fresh.add(key)
        self._trim()

    def use(self, key: K) -> None:
        """It was asked for and is there; nothing happens where it is not."""
        if key in self._fresh:
            self._fresh.remove(key)
            del self._t1[key]
            self._admit(key)
            self._trim()
        elif key in self._t1:
            del self._t1[key]
            self._t2[key] = None
        elif key in self._t2:
            self._t2.move_to_end(key)

    def remove(self, key: K) -> None:
        """It has left the cache, and is remembered; nothing happens where it was not there."""
        if key in self._fresh:
            self._fresh.remove(key)
            del self._t1[key]
        elif key in self._t1:
            del self._t1[key]
            self._b1[key] = None
        elif key in self._t2:
            del self._t2[key]
            self._b2[key] = None

    def is_fresh(self, key: K) -> bool:
        """In the cache and never asked for."""
        return key in self._fresh

    def _step(self, key: K) -> float:
        """How far a miss of it moves p. The sizes are those before anybody makes room for it."""
        if key in self._b1:
            return max(1.0, len(self._b2) / len(self._b1))
        if key in self._b2:
            return -max(1.0, len(self._b1) / len(self._b2))
        return 0.0

    def _aim(self, step: float) -> float:
        return min(max(self.p + step, 0.0), float(self.capacity))

    def _admit(self, key: K) -> None:
        planned, self._planned = self._planned, None
        step = planned[1] if planned is not None and planned[0] == key else self._step(key)
        if key in self._b1 or key in self._b2:
            self.p = self._aim(step)
            self._b1.pop(key, None)
            self._b2.pop(key, None)
            self._t2[key] = None
        else:
            self._t1[key] = None

    def _trim(self) -> None:
        """At most c keys in t1 and b1 together, at most 2 c in all four lists."""
        while self._b1 and len(self._t1) + len(self._b1) > self.capacity:
            self._b1.popitem(last=False)
        while self._b2 and len(self) + len(self._b1) + len(self._b2) > 2 * self.capacity:
            self._b2.popitem(last=False)
        while self._b1 and len(self) + len(self._b1) > 2 * self.capacity:
            self._b1.popitem(last=False)


class ARC(Cacheless):
    """Everybody stays; ARC over the experts of all layers says who makes room. A use is a gate that names the
    expert."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self.lists: AdaptiveReplacement[ExpertId] = AdaptiveReplacement()

    def check(self, shape: ModelShape, slots: int) -> None:
        self.lists.resize(slots)

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        self.lists.add(expert, referenced=not predicted)
        return True

    def used(self, worker: int, expert: ExpertId, hit: bool, score: float | None) -> None:
        if hit or self.lists.is_fresh(expert):
            self.lists.use(expert)

    def left(self, worker: int, expert: ExpertId) -> None:
        self.lists.remove(expert)

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        chosen = self.lists.choose(incoming, evictable)
        return chosen if chosen is not None else next(iter(evictable))


class ShallowARC(Shares):
    """Fate's cache (section 4.4): the first `shallow` layers are cached whole, in their order as far as the slots go;
    what is left is shared evenly by the others; in each layer ARC says who makes room. A layer without a share keeps
    nobody.

    Assumed: `shallow` None is a sixth of the layers, rounded up, as Fate's 4 of Qwen1.5-MoE's 24; the paper sets it by
    offline statistics of prefetch accuracy. `passing` slots are kept out of the shares, see Shares; None: as few as
    there, or where some layer's share would not hold a token's experts, twice those, this layer's and what is fetched
    for the next one.
    """

    def __init__(self, shape: ModelShape, shallow: int | None = None, passing: int | None = None) -> None:
        super().__init__(shape, PASSING if passing is None else passing)
        layers = len(shape.layers)
        if shallow is not None and not 0 <= shallow <= layers:
            raise ConfigError(f"shallow is {shallow}; allowed: 0 to {layers}, the model's MoE layers")
        self.shallow = -(-layers // 6) if shallow is None else shallow
        self.lists: dict[int, AdaptiveReplacement[ExpertId]] = {layer: AdaptiveReplacement() for layer in shape.layers}
        self._chosen = passing is not None

    def check(self, shape: ModelShape, slots: int) -> None:
        super().check(shape, slots)
        if not self._chosen and any(share < shape.top_k for share in self.share.values()):
            self.set_shares(self.shares(kept_slots(shape, slots, 2 * shape.top_k)))

    def shares(self, slots: int) -> Sequence[int]:
        shares = []
        for count in self.counts[: self.shallow]:
            shares.append(min(count, slots))
            slots -= shares[-1]
        return shares + evenly(slots, self.counts[self.shallow :])

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

    def used(self, worker: int, expert: ExpertId, hit: bool, score: float | None) -> None:
        lists = self.lists[expert.layer]
        if hit or lists.is_fresh(expert):
            lists.use(expert)

    def left(self, worker: int, expert: ExpertId) -> None:
        super().left(worker, expert)
        self.lists[expert.layer].remove(expert)
