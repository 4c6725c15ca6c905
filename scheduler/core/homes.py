"""Where each expert lives, when all of them stay in a slot of their own."""

from __future__ import annotations

from scheduler.types import ExpertId, ModelShape


class Homes:
    """Experts in order, layer by layer, go round the workers as prefill's shares do (`RoundRobin.share`); a worker
    whose slots are all taken is passed over. Nobody moves but the experts of a worker that is lost: they take places
    that are left, and so do those for whom there were too few, when workers come."""

    def __init__(self, shape: ModelShape) -> None:
        self._homes: dict[ExpertId, int] = {}
        self._homeless = [
            ExpertId(layer, expert) for i, layer in enumerate(shape.layers) for expert in range(shape.count(i))
        ]
        self._room: dict[int, int] = {}

    def joined(self, worker: int, slots: int) -> None:
        self._room[worker] = slots

    def lost(self, worker: int) -> None:
        del self._room[worker]
        self._homeless += [expert for expert, home in self._homes.items() if home == worker]
        self._homeless.sort()

    def settle(self) -> None:
        """Give all who have none a home, as far as there is room."""
        if not self._homeless:
            return
        most = max(self._room.values(), default=0)
        places = [worker for turn in range(most) for worker, room in sorted(self._room.items()) if turn < room]
        for expert, worker in zip(self._homeless, places, strict=False):
            self._homes[expert] = worker
            self._room[worker] -= 1
        del self._homeless[: len(places)]

    def of(self, expert: ExpertId) -> int:
        """The worker; everybody must have been settled."""
        return self._homes[expert]
