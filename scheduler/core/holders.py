"""Which workers hold an expert: all of them, or, if the store is in parts, those whose part it is in."""

from __future__ import annotations

import math

from scheduler.held import experts_of
from scheduler.types import ExpertId, HeldRange

Held = frozenset[ExpertId] | None
"""None: all experts."""


class Holders:
    """Of the workers with slots, and of host places apart from them. A worker that is lost is remembered, so that an
    error can name it."""

    def __init__(self) -> None:
        self.in_parts = False
        """A worker with slots does not hold all."""
        self._held: dict[int, Held] = {}
        self._slots: dict[int, int] = {}
        """0 for a host place."""
        self._gone: dict[int, tuple[Held, str]] = {}
        """What lost workers held, and why they are lost."""
        self._found: dict[ExpertId, tuple[int, ...]] = {}

    def on_worker_joined(self, worker: int, slots: int, held: tuple[HeldRange, ...] | None) -> None:
        self._slots[worker] = slots
        self._gone.pop(worker, None)
        self.on_changed(worker, held)

    def on_changed(self, worker: int, held: tuple[HeldRange, ...] | None) -> None:
        """The worker holds these from now on."""
        self._held[worker] = None if held is None else experts_of(held)
        self._refresh()

    def on_worker_lost(self, worker: int, reason: str) -> None:
        self._gone[worker] = self._held.pop(worker), reason
        del self._slots[worker]
        self._refresh()

    def _refresh(self) -> None:
        self._found.clear()
        self.in_parts = any(slots and self._held[worker] is not None for worker, slots in self._slots.items())

    def holds(self, worker: int, expert: ExpertId) -> bool:
        return _has(self._held[worker], expert)

    def of(self, expert: ExpertId) -> tuple[int, ...]:
        """The workers with slots that hold it, ascending."""
        found = self._found.get(expert)
        if found is None:
            found = tuple(n for n, slots in sorted(self._slots.items()) if slots and self.holds(n, expert))
            self._found[expert] = found
        return found

    def home(self, expert: ExpertId) -> int:
        """The one of its holders to which a cache sticks, as long as that holds it and none comes that is rated higher.
        A worker with twice the slots is the home of twice as many. Weighted rendezvous hashing (Thaler and Ravishankar,
        "Using name-based mappings to increase hit rates", IEEE/ACM Transactions on Networking 6(1), 1998)."""
        return max(self.of(expert), key=lambda worker: -self._slots[worker] / math.log(_chance(worker, expert)))

    def story(self, expert: ExpertId) -> str:
        """Why no worker holds it."""
        what = f"expert {expert.expert} of layer {expert.layer}"
        gone = [f"worker {n} ({why})" for n, (held, why) in sorted(self._gone.items()) if _has(held, expert)]
        if not gone:
            return f"no worker holds {what}, and none that is lost did"
        return f"{what} was held by {', '.join(gone)}, lost since, and by no worker that is connected"


def _has(held: Held, expert: ExpertId) -> bool:
    return held is None or expert in held


def _chance(worker: int, expert: ExpertId) -> float:
    """In (0, 1), as if at random: the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
    number generators", OOPSLA 2014)."""
    mask = (1 << 64) - 1
    value = ((worker + 1) * 0x9E3779B97F4A7C15 + (expert.layer << 20) + expert.expert) & mask
    for _ in range(2):
        value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ value >> 27) * 0x94D049BB133111EB) & mask
        value ^= value >> 31
    return ((value >> 11) + 0.5) / (1 << 53)
