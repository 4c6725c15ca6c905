"""Residency: which experts stay in their slots once nothing needs them, and which is evicted for another."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from scheduler.errors import ConfigError
from scheduler.policies.predictors.base import Scores
from scheduler.types import ExpertId, ModelShape, Visit

PASSING_SLOTS = 2
"""Slots in which no expert stays, for experts that must be loaded and may not stay: one is loaded while the other is
computed."""

REMEMBERED_REQUESTS = 16
"""The choices of the last gates are kept for so many requests, the latest."""


class Residency(Protocol):
    """One object serves one `Core`, all workers together. An expert that stays needs no load when it is chosen again: a
    hit."""

    @property
    def has_homes(self) -> bool:
        """Each expert has one worker, the same in prefill and decoding, and is loaded nowhere else."""

    @property
    def wants_scores(self) -> bool:
        """It reads the gates' scores."""

    def check(self, shape: ModelShape, slots: int) -> None:
        """Called first, and when workers come or go. `slots`: of all workers. Raises ConfigError: too few slots."""

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        """A load begins: may the expert stay once nothing needs it? If not, it is evicted then.

        `predicted`: no gate has chosen it yet.
        """

    def on_gate_fired(self, visit: Visit, rows: Mapping[int, int], scores: Scores, prefill: bool) -> None:
        """A gate has fired, before anything is decided. `rows`: chosen expert -> its rows. `scores`: of every row, or
        empty if the core does not get them."""

    def on_used(self, worker: int, expert: ExpertId, hit: bool, form: str) -> None:
        """The rows of a chosen expert are sent to it; it is in a slot or in flight. `hit`: no load began for this use.
        `form`: the one that the precision asks for, in whatever form it is held."""

    def on_left(self, worker: int, expert: ExpertId) -> None:
        """An expert that was kept is gone: evicted, pre-empted, failed, or lost with its worker."""

    def full(self, incoming: ExpertId) -> bool:
        """The share of the slots for `incoming` is used up: another must be evicted even if a slot is free."""

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        """Which of `evictable` is evicted for `incoming`. None: none; it waits for a free slot.

        `evictable`: not empty; kept experts that nothing needs, longest unneeded first. For an expert that a gate has
        chosen the core evicts the first in spite of None if nothing on that worker would ever leave.
        """

    def warm(self, slots: int) -> Iterable[ExpertId]:
        """Prefill is over: the experts to load before decoding, most important first. Empty: no change."""


class ResidencyBase:
    """Neutral defaults, which keep no expert. The base class of the others."""

    has_homes = False
    wants_scores = False

    def check(self, shape: ModelShape, slots: int) -> None:
        pass

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        return False

    def on_gate_fired(self, visit: Visit, rows: Mapping[int, int], scores: Scores, prefill: bool) -> None:
        pass

    def on_used(self, worker: int, expert: ExpertId, hit: bool, form: str) -> None:
        pass

    def on_left(self, worker: int, expert: ExpertId) -> None:
        pass

    def full(self, incoming: ExpertId) -> bool:
        return False

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        return None

    def warm(self, slots: int) -> Iterable[ExpertId]:
        return ()


class NoCache(ResidencyBase):
    """No expert stays: each is evicted once it is computed, or turns out not to be needed (OD-MoE)."""


class Everything(ResidencyBase):
    """All experts stay, each in a slot of its own: the same cluster, fully cached. Nothing is ever evicted."""

    has_homes = True

    def check(self, shape: ModelShape, slots: int) -> None:
        needed = sum(shape.count(ordinal) for ordinal in range(len(shape.layers)))
        if slots < needed:
            raise ConfigError(
                f"residency all keeps every expert in a slot of its own: {needed} slots are needed, {slots} are there; "
                "give more (--slots, or --device-memory 100%), or take more workers"
            )

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        return True


class ChosenByGates:
    """Experts that each request's last gate has chosen and that are not in use yet: none of them may be evicted."""

    def __init__(self) -> None:
        self._chosen: OrderedDict[int, set[ExpertId]] = OrderedDict()  # request -> experts

    def on_gate_fired(self, visit: Visit, chosen: Iterable[int]) -> None:
        """A gate has fired. The choice of the request's gate before it has been computed."""
        self._chosen[visit.request] = {ExpertId(visit.layer, number) for number in chosen}
        self._chosen.move_to_end(visit.request)
        while len(self._chosen) > REMEMBERED_REQUESTS:
            self._chosen.popitem(last=False)

    def on_used(self, expert: ExpertId) -> None:
        """The expert is in use: from now on the core itself does not offer it for eviction."""
        for experts in self._chosen.values():
            if expert in experts:
                experts.remove(expert)
                return

    def __contains__(self, expert: object) -> bool:
        return any(expert in experts for experts in self._chosen.values())


def kept_slots(shape: ModelShape, slots: int, passing: int = PASSING_SLOTS) -> int:
    """How many of `slots` are for experts that stay: all but `passing`, and at least half.

    All of them if every expert has a slot.
    """
    if slots >= sum(shape.count(ordinal) for ordinal in range(len(shape.layers))):
        return slots
    return slots - min(passing, slots // 2)
