"""The one worker of each expert, where every expert stays in a slot of its own."""

from __future__ import annotations

from collections.abc import Collection

from scheduler.core.holders import Holders
from scheduler.types import ExpertId, ModelShape


class Homes:
    """Experts are spread over the workers in order, layer by layer, as prefill's shares are (`RoundRobin.share`). A
    worker without a free slot is passed over. Of a store in parts, each goes to the one with most room of those that
    hold it. A home changes only if its worker is lost, or does not hold the expert any more: its experts then take
    slots that are left. Experts that found no slot get one when workers join."""

    def __init__(self, shape: ModelShape, holders: Holders) -> None:
        self._homes: dict[ExpertId, int] = {}
        self._homeless = [
            ExpertId(layer, expert) for i, layer in enumerate(shape.layers) for expert in range(shape.count(i))
        ]
        self._holders = holders
        self._room: dict[int, int] = {}

    def on_worker_joined(self, worker: int, slots: int) -> None:
        self._room[worker] = slots

    def on_worker_lost(self, worker: int) -> None:
        del self._room[worker]
        self._homeless += [expert for expert, home in self._homes.items() if home == worker]
        self._homeless.sort()

    def on_holdings_changed(self, worker: int, in_slots: Collection[ExpertId]) -> None:
        """Experts that it does not hold any more need another home, unless they are in its slots."""
        lived = [expert for expert, home in self._homes.items() if home == worker]
        leaving = [one for one in lived if one not in in_slots and not self._holders.holds(worker, one)]
        for expert in leaving:
            del self._homes[expert]
        self._room[worker] += len(leaving)
        self._homeless = sorted((*self._homeless, *leaving))

    def room(self, worker: int) -> int:
        """Its slots that are no expert's home."""
        return self._room[worker]

    def settle(self) -> None:
        """Give experts without a home one, as far as there are slots."""
        if not self._homeless:
            return
        if self._holders.in_parts:
            self._settle_parts()
            return
        most = max(self._room.values(), default=0)
        places = [worker for turn in range(most) for worker, room in sorted(self._room.items()) if turn < room]
        for expert, worker in zip(self._homeless, places, strict=False):
            self._homes[expert] = worker
            self._room[worker] -= 1
        del self._homeless[: len(places)]

    def _settle_parts(self) -> None:
        """Those that fewest hold come first. Where all that hold one are full, another expert of this time makes room
        by moving on: as many find a home as can (Kuhn, "The Hungarian method for the assignment problem", Naval
        Research Logistics Quarterly 2, 1955)."""
        left, fresh, closed = [], set[ExpertId](), set[int]()
        for expert in self._homeless:
            self._homes.pop(expert, None)
        for expert in sorted(self._homeless, key=lambda one: len(self._holders.of(one))):
            path = self._path(expert, fresh, closed)
            if path is None:
                left.append(expert)
                continue
            for moved, worker in path:
                self._homes[moved] = worker
                fresh.add(moved)
            self._room[path[-1][1]] -= 1
        self._homeless = sorted(left)

    def _path(self, expert: ExpertId, fresh: set[ExpertId], closed: set[int]) -> list[tuple[ExpertId, int]] | None:
        """The homes that change so that it gets one; only the last worker of them has one slot fewer free. Breadth
        first. None: no holder has room, or can be given any; those that were asked are `closed` from then on."""
        queue: list[list[tuple[ExpertId, int]]] = [[]]
        reached = set(closed)
        for path in queue:
            moving = path[-1][0] if path else expert
            holders = [one for one in self._holders.of(moving) if one not in reached]
            for worker in sorted(holders, key=lambda one: -self._room[one]):
                step = [*path[:-1], (moving, worker)] if path else [(moving, worker)]
                if self._room[worker]:
                    return step
                reached.add(worker)
                movable = (one for one in fresh if self._homes[one] == worker)
                queue += [[*step, (one, worker)] for one in sorted(movable)]
        closed |= reached
        return None

    def worker_of(self, expert: ExpertId) -> int | None:
        """The expert's worker. None only in parts: no worker that holds it had a slot for it."""
        return self._homes.get(expert)
