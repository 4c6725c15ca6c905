"""The one worker of each expert, where every expert stays in a slot of its own."""

from __future__ import annotations

from scheduler.types import ExpertId, ModelShape


class Homes:
    """Experts are spread over the workers in order, layer by layer, as prefill's shares are (`RoundRobin.share`). A
    worker without a free slot is passed over. A home never changes, unless its worker is lost: its experts then take
    slots that are left. Experts that found no slot get one when workers join."""

    def __init__(self, shape: ModelShape) -> None:
        self._homes: dict[ExpertId, int] = {}
        self._homeless = [
            ExpertId(layer, expert) for i, layer in enumerate(shape.layers) for expert in range(shape.count(i))
        ]
        self._room: dict[int, int] = {}

    def on_worker_joined(self, worker: int, slots: int) -> None:
        self._room[worker] = slots

    def on_worker_lost(self, worker: int) -> None:
        del self._room[worker]
        self._homeless += [expert for expert, home in self._homes.items() if home == worker]
        self._homeless.sort()

    def room(self, worker: int) -> int:
        """Its slots that are no expert's home."""
        return self._room[worker]

    def settle(self) -> None:
        """Give experts without a home one, as far as there are slots."""
        if not self._homeless:
            return
        most = max(self._room.values(), default=0)
        places = [worker for turn in range(most) for worker, room in sorted(self._room.items()) if turn < room]
        for expert, worker in zip(self._homeless, places, strict=False):
            self._homes[expert] = worker
            self._room[worker] -= 1
        del self._homeless[: len(places)]

    def worker_of(self, expert: ExpertId) -> int:
        """The expert's worker. All experts must be settled."""
        return self._homes[expert]
