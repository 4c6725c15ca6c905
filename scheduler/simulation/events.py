"""A virtual clock: a heap of actions, each with its time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from copy import copy
from heapq import heappop, heappush
from typing import Any


class EventHeap:
    """Actions in the order of their times; at equal times, in the order of the calls of `at`. Times are seconds."""

    __slots__ = ("_heap", "_order", "_stopped", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[Any], object], Any]] = []
        self._order = itertools.count()
        self._stopped = False

    def at(self, when: float, act: Callable[[Any], object], what: Any) -> None:
        """Call `act(what)` when the clock reaches `when`."""
        heappush(self._heap, (when, next(self._order), act, what))

    def run(self) -> None:
        """Run actions until one of them calls `stop`, or none is left."""
        heap, self._stopped = self._heap, False
        while heap and not self._stopped:
            self.now, _, act, what = heappop(heap)
            act(what)

    def step(self) -> bool:
        """Run the next action. Returns False if there is none."""
        if not self._heap:
            return False
        self.now, _, act, what = heappop(self._heap)
        act(what)
        return True

    def stop(self) -> None:
        """End `run` after this action."""
        self._stopped = True

    @property
    def count(self) -> int:
        """The number of all actions so far, including those still in the heap."""
        return next(copy(self._order))
