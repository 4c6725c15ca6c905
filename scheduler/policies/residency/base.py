"""Which experts stay in their slots when nothing needs them any more: policies, told what happens, asked who goes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from scheduler.errors import ConfigError
from scheduler.policies.predictors.base import Scores
from scheduler.types import ExpertId, ModelShape, Visit


class Residency(Protocol):
    """One policy; one object serves one core. An expert that stays is found by whoever needs it next, without a load.

    `homed`: every expert has one worker, the same in prefill and decoding, and is loaded nowhere else.
    `wants_scores`: it reads the scores of gates.
    """

    @property
    def homed(self) -> bool: ...

    @property
    def wants_scores(self) -> bool: ...

    def check(self, shape: ModelShape, slots: int) -> None:
        """Told at first and whenever workers come or go: `slots` of all workers together. Raises ConfigError where they
        cannot hold what must stay."""

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        """Its load begins: may it stay once nothing needs it? If not, it is evicted then. `predicted`: no gate has
        named it yet."""

    def observed(self, visit: Visit, named: Mapping[int, int], scores: Scores, prefill: bool) -> None:
        """A gate has fired, before anything of it is decided: expert -> rows, and for each row the score of every
        expert (empty where the core does not get them)."""

    def used(self, worker: int, expert: ExpertId, hit: bool, score: float | None) -> None:
        """It is in a slot (or on its way) and a gate has named it. `hit`: no load was begun for this use.
        `score`: the gate's mean over the rows, where the core gets scores."""

    def left(self, worker: int, expert: ExpertId) -> None:
        """One that was kept is gone: evicted, or lost with its worker."""

    def full(self, incoming: ExpertId) -> bool:
        """Its part of the slots is used up: somebody is to make room for it although a slot may be free."""

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        """Which of `evictable` (not empty; kept, and needed by nobody now, the longest first) makes room for
        `incoming`. None: nobody; it waits for a free slot. Where a gate has named it and nothing on that worker would
        ever leave, the first goes all the same."""

    def warm(self, slots: int) -> Iterable[ExpertId]:
        """Prefill is over: who is to be in the slots when decoding begins, most wanted first; empty: as it is."""


class Cacheless:
    """Nobody stays: an expert is evicted as soon as it was computed, or turned out not to be needed (OD-MoE)."""

    homed = False
    wants_scores = False

    def check(self, shape: ModelShape, slots: int) -> None:
        pass

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        return False

    def observed(self, visit: Visit, named: Mapping[int, int], scores: Scores, prefill: bool) -> None:
        pass

    def used(self, worker: int, expert: ExpertId, hit: bool, score: float | None) -> None:
        pass

    def left(self, worker: int, expert: ExpertId) -> None:
        pass

    def full(self, incoming: ExpertId) -> bool:
        return False

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        return None

    def warm(self, slots: int) -> Iterable[ExpertId]:
        return ()


class Everything(Cacheless):
    """Everybody stays, each in a slot of its own: the same cluster, fully cached. Nothing is ever evicted."""

    homed = True

    def check(self, shape: ModelShape, slots: int) -> None:
        needed = sum(shape.count(ordinal) for ordinal in range(len(shape.layers)))
        if slots < needed:
            raise ConfigError(
                f"residency all keeps every expert in a slot of its own: {needed} slots are needed, {slots} are there; "
                "give more (--slots, or --device-memory 100%), or take more workers"
            )

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        return True


PASSING = 2
"""Slots that nobody stays in, for what must be loaded and may not stay: one is loaded while the other is computed."""


REQUESTS = 16
"""Of so many requests, the latest ones, it is known what their last gates named."""


class NamedByGates:
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
