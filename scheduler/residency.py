"""Which experts stay in their slots when nothing needs them any more: policies, told what happens, asked who goes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from scheduler.errors import ConfigError
from scheduler.types import ExpertId, ModelShape


class Residency(Protocol):
    """One policy; one object serves one core. An expert that stays is found by whoever needs it next, without a load.

    `homed`: every expert has one worker, the same in prefill and decoding, and is loaded nowhere else.
    """

    @property
    def homed(self) -> bool: ...

    def check(self, shape: ModelShape, slots: int) -> None:
        """Raises ConfigError where a cluster of `slots` slots, all workers' together, cannot hold what must stay."""

    def keeps(self, worker: int, expert: ExpertId) -> bool:
        """Its load begins: may it stay once nothing needs it? If not, it is evicted then."""

    def used(self, worker: int, expert: ExpertId, hit: bool, score: float | None) -> None:
        """It is in a slot (or on its way) and a gate has named it. `hit`: no load was begun for this use.
        `score`: the gate's, where the gate said it."""

    def left(self, worker: int, expert: ExpertId) -> None:
        """One that was kept is gone: evicted, or lost with its worker."""

    def victim(self, worker: int, wanted: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        """No slot is free for `wanted`: which of `evictable` (not empty; kept, and needed by nobody now, the longest
        first) makes room. None: nobody, `wanted` waits for another slot; where a gate has named it and nothing on that
        worker would ever leave, the first goes all the same."""


class Cacheless:
    """Nobody stays: an expert is evicted as soon as it was computed, or turned out not to be needed (OD-MoE)."""

    homed = False

    def check(self, shape: ModelShape, slots: int) -> None:
        pass

    def keeps(self, worker: int, expert: ExpertId) -> bool:
        return False

    def used(self, worker: int, expert: ExpertId, hit: bool, score: float | None) -> None:
        pass

    def left(self, worker: int, expert: ExpertId) -> None:
        pass

    def victim(self, worker: int, wanted: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        return None


class Everything(Cacheless):
    """Everybody stays, each in a slot of its own: the same cluster, fully cached. Nothing is ever evicted."""

    homed = True

    def check(self, shape: ModelShape, slots: int) -> None:
        needed = sum(shape.count(ordinal) for ordinal in range(len(shape.layers)))
        if slots < needed:
            raise ConfigError(
                f"residency all keeps every expert in a slot of its own: {needed} slots are needed, {slots} are there; "
                "give workers more slots (--slots), or take more workers"
            )

    def keeps(self, worker: int, expert: ExpertId) -> bool:
        return True


CACHELESS = Cacheless()

_POLICIES: dict[str, Callable[[], Residency]] = {"none": Cacheless, "all": Everything}


def make_residency(name: str) -> Residency:
    """What --residency names, new. Raises ConfigError."""
    if name not in _POLICIES:
        raise ConfigError(f"--residency is {name!r}; allowed: {', '.join(_POLICIES)}")
    return _POLICIES[name]()
