"""Computations of a worker that can begin, by the expert in whose slot they are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from checkpoint.kernels import SHARED_ROWS
from checkpoint.tensors import received_tensor
from wire.messages import Compute
from worker_node.occupancy import SlotOccupancy


@dataclass(slots=True)
class Group:
    """Computations with the expert in one slot that are made together. `received`: when the last of them came."""

    occupancy: SlotOccupancy
    messages: list[Compute]
    received: float


class ReadyComputations:
    """In the order in which they became ready. Used with its session's lock held."""

    def __init__(self) -> None:
        self.count = 0
        self._occupancies: dict[SlotOccupancy, None] = {}
        """Those for which something is ready."""

    def add(self, occupancy: SlotOccupancy, message: Compute, received: float) -> None:
        occupancy.ready.append((message, received))
        self._occupancies[occupancy] = None
        self.count += 1

    def take(self, occupancy: SlotOccupancy, computes_together: Callable[[int, str], bool]) -> list[Group]:
        """Its first computation, which is about to be made, and those of its layer where the worker makes these
        together. Empty where it was made with an earlier one."""
        if not occupancy.ready:
            return []
        first = self._take(occupancy)
        if not computes_together(occupancy.expert.layer, occupancy.form):
            return [first]
        return [first, *self._take_layer(first)]

    def _take(self, occupancy: SlotOccupancy) -> Group:
        message, received = occupancy.ready.popleft()
        self._left(occupancy, 1)
        occupancy.computing = not occupancy.cancelled.is_set()
        return Group(occupancy, [message], received)

    def _take_layer(self, first: Group) -> list[Group]:
        """What is ready of other experts of the layer, in the full form, and few rows in all. Not of a slot that is to
        be evicted, which comes free sooner if it is alone, nor of several passes."""
        if not _joins(first.messages[0]) or not first.occupancy.computing:
            return []
        found: list[Group] = []
        room = SHARED_ROWS - row_count(first.messages[0])
        for other in list(self._occupancies):
            ahead = other.ready[0][0]
            if other.expert.layer != first.occupancy.expert.layer or other.form or other.cancelled.is_set():
                continue
            if _joins(ahead) and (room := room - row_count(ahead)) >= 0:
                found.append(self._take(other))
        return found

    def join(self, group: Group) -> None:
        """Add to it what is ready of other requests for its slot, up to `SHARED_ROWS`."""
        occupancy, room = group.occupancy, SHARED_ROWS - row_count(group.messages[0])
        while occupancy.ready and (room := room - row_count(occupancy.ready[0][0])) >= 0:
            message, group.received = occupancy.ready.popleft()
            group.messages.append(message)
            self._left(occupancy, 1)

    def drop(self, occupancy: SlotOccupancy) -> int:
        """Forget what is ready for a slot. How many computations that were."""
        dropped = len(occupancy.ready)
        occupancy.ready.clear()
        self._left(occupancy, dropped)
        return dropped

    def _left(self, occupancy: SlotOccupancy, count: int) -> None:
        self.count -= count
        if not occupancy.ready:
            self._occupancies.pop(occupancy, None)


def _joins(message: Compute) -> bool:
    return not (message.evict or message.passes)


def row_count(message: Compute) -> int:
    """Rows of a computation."""
    return math.prod(message.weights.shape)


def rows_of(messages: Sequence[Compute]) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [n, H] and routing weights [n] of all, one after the other."""
    hidden, weights = zip(
        *((received_tensor(one.hidden), received_tensor(one.weights)) for one in messages), strict=True
    )
    return (hidden[0], weights[0]) if len(messages) == 1 else (torch.cat(hidden), torch.cat(weights))
