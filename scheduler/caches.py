"""Caches that everybody knows, as residencies; and what several others are built on: shares of the slots for each
layer, and what a gate has named but nobody computes yet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence

from scheduler.predictors import Scores
from scheduler.residency import Cacheless
from scheduler.types import ExpertId, ModelShape, Visit

PASSING = 2
"""Slots that nobody stays in, for what must be loaded and may not stay: one is loaded while the other is computed."""

REQUESTS = 16
"""Of so many requests, the latest ones, it is known what their last gates named."""


class LRU(Cacheless):
    """Everybody stays; the least recently used makes room (mixtral-offloading, section 3.1, there for each layer).

    Assumed: one order over all layers. A load counts as a use, so that what was loaded for a prediction is not the next
    to go.
    """

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self._clock = 0
        self._last: dict[ExpertId, int] = {}

    def _touch(self, expert: ExpertId) -> None:
        self._clock += 1
        self._last[expert] = self._clock

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        self._touch(expert)
        return True

    def used(self, worker: int, expert: ExpertId, hit: bool, score: float | None) -> None:
        self._touch(expert)

    def age(self, expert: ExpertId) -> int:
        """Grows with the last use; 0 where it was never used."""
        return self._last.get(expert, 0)

    def victim(self, worker: int, wanted: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        return min(evictable, key=self.age)


class LFU(LRU):
    """Everybody stays; the least frequently used makes room, among equals the least recently used.

    A use is a visit that computes it in its slot, for however many rows. Assumed: uses go on being counted when an
    expert has left, and counts do not age.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self._uses: dict[ExpertId, int] = {}

    def used(self, worker: int, expert: ExpertId, hit: bool, score: float | None) -> None:
        super().used(worker, expert, hit, score)
        self._uses[expert] = self._uses.get(expert, 0) + 1

    def victim(self, worker: int, wanted: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        uses = self._uses
        return min(evictable, key=lambda expert: (uses.get(expert, 0), self.age(expert)))


class Static(LRU):
    """A hot set that is chosen once: the experts that the first prefill activated most, for most rows (KTransformers
    and llama.cpp place experts before they answer). Whoever is not in it is evicted once it was computed.

    `passing`: slots left to those, at most half of all. Assumed: counted on the first prompt instead of offline; until
    then everybody stays and whoever the prompt activated least makes room.
    """

    def __init__(self, shape: ModelShape, passing: int = PASSING) -> None:
        super().__init__(shape)
        self.passing = passing
        self.hot: tuple[ExpertId, ...] = ()
        self._room = 0
        self._rows: dict[ExpertId, int] = {}
        self._fixed: frozenset[ExpertId] | None = None

    def check(self, shape: ModelShape, slots: int) -> None:
        self._room = kept_slots(shape, slots, self.passing)
        if self._fixed is not None:
            self._fix()

    def _fix(self) -> None:
        ranked = sorted(self._rows, key=lambda expert: (-self._rows[expert], expert))
        self.hot = tuple(ranked[: self._room])
        self._fixed = frozenset(self.hot)

    def observed(self, visit: Visit, named: Mapping[int, int], scores: Scores, prefill: bool) -> None:
        if prefill and self._fixed is None:
            for number, rows in named.items():
                expert = ExpertId(visit.layer, number)
                self._rows[expert] = self._rows.get(expert, 0) + rows

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        self._touch(expert)
        return self._fixed is None or expert in self._fixed

    def victim(self, worker: int, wanted: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        if self._fixed is None:
            return min(evictable, key=lambda expert: (self._rows.get(expert, 0), self.age(expert)))
        cold = [expert for expert in evictable if expert not in self._fixed]
        return min(cold, key=self.age) if cold else None

    def warm(self, slots: int) -> Iterable[ExpertId]:
        if self._fixed is None and self._rows:
            self._fix()
        return self.hot[:slots]


class Shares(LRU):
    """A base: each layer has its own share of the slots, and the least recently used of a layer makes room in it.

    Shares are over all workers together. What its layer's share has no room for is loaded all the same, and evicted
    once it was computed; so shares are never exceeded, and when they shrink, the loads that follow bring them down.

    `passing`: slots that are in no share, at most half of all; none where every expert has a slot.
    """

    def __init__(self, shape: ModelShape, passing: int = PASSING) -> None:
        super().__init__(shape)
        self.passing = passing
        self.counts = [shape.count(ordinal) for ordinal in range(len(shape.layers))]
        self.share: dict[int, int] = dict.fromkeys(shape.layers, 0)
        self.kept: dict[int, set[ExpertId]] = {layer: set() for layer in shape.layers}
        self._workers: set[int] = set()

    def shares(self, slots: int) -> Sequence[int]:
        """How many of `slots` each layer gets, in their order. To be overridden where they are not to be equal."""
        return evenly(slots, self.counts)

    def weakest(self, layer: int, wanted: ExpertId, among: Collection[ExpertId]) -> ExpertId | None:
        """Who of `among` (not empty; all of `layer`) makes room for `wanted`."""
        return min(among, key=self.age)

    def check(self, shape: ModelShape, slots: int) -> None:
        self.set_shares(self.shares(kept_slots(shape, slots, self.passing)))

    def set_shares(self, shares: Sequence[int]) -> None:
        self.share = dict(zip(self.shape.layers, shares, strict=True))

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        self._workers.add(worker)
        self._touch(expert)
        stays = expert in self.kept[expert.layer] or not self.full(expert)
        if stays:
            self.kept[expert.layer].add(expert)
        return stays

    def left(self, worker: int, expert: ExpertId) -> None:
        self.kept[expert.layer].discard(expert)

    def full(self, wanted: ExpertId) -> bool:
        return len(self.kept[wanted.layer]) >= self.share[wanted.layer]

    def victim(self, worker: int, wanted: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        own = [expert for expert in evictable if expert.layer == wanted.layer]
        if own and self.full(wanted):
            return self.weakest(wanted.layer, wanted, own)
        over = [expert for expert in evictable if len(self.kept[expert.layer]) > self.share[expert.layer]]
        if over:
            layer = max(over, key=lambda expert: len(self.kept[expert.layer]) - self.share[expert.layer]).layer
            return self.weakest(layer, wanted, [expert for expert in over if expert.layer == layer])
        if self.full(wanted) or len(self._workers) < 2:
            return None  # a passing slot comes free
        layer = wanted.layer if own else min(evictable, key=self.age).layer  # this worker's slots may hold no other
        return self.weakest(layer, wanted, [expert for expert in evictable if expert.layer == layer])


class Named:
    """What the last gate of each request has named and what is not in use yet: no slot may be taken from it."""

    def __init__(self) -> None:
        self._of: OrderedDict[int, set[ExpertId]] = OrderedDict()

    def observed(self, visit: Visit, named: Iterable[int]) -> None:
        """Whatever an earlier gate of this request named has been computed."""
        self._of[visit.request] = {ExpertId(visit.layer, number) for number in named}
        self._of.move_to_end(visit.request)
        while len(self._of) > REQUESTS:
            self._of.popitem(last=False)

    def used(self, expert: ExpertId) -> None:
        """From now on it is in use, and the core offers it to nobody."""
        for experts in self._of.values():
            if expert in experts:
                experts.remove(expert)
                return

    def __contains__(self, expert: object) -> bool:
        return any(expert in experts for experts in self._of.values())


def kept_slots(shape: ModelShape, slots: int, passing: int) -> int:
    """How many of `slots` are for those that stay: all less `passing`, which are at most half; all where every expert
    has one."""
    if slots >= sum(shape.count(ordinal) for ordinal in range(len(shape.layers))):
        return slots
    return slots - min(passing, slots // 2)


def evenly(slots: int, counts: Sequence[int]) -> list[int]:
    """`slots` in equal shares, none above its count; what does not divide goes to the first ones."""
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
