"""Which rows are sent to be computed, and which answers are owed."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler import types as t
from scheduler.core.state import Demand, LayerVisit
from scheduler.policies.residency.base import Residency

LEAST_ROWS, MOST_PARTS = 16, 8
"""Mini-batches, where nobody says how large: parts of 16 rows overlap transfers and computations best on the paper's
testbed (`scripts/papers/sweep_minibatch.py`), and each part costs a message and a start: so there are at most eight."""


class RowDispatcher:
    """`owed`: demands by the ids of their calls that were not answered. `at_once`: not as Core's prefill `in-turn`.

    `ready` is told of each demand that the gate has named and that has its slot: its rows are sent now, or together.
    """

    def __init__(
        self, out: list[t.Command], ids: Iterator[int], mini_batch: int | None, residency: Residency, at_once: bool
    ) -> None:
        self.owed: dict[int, Demand] = {}
        self.held_back: dict[t.Visit, LayerVisit] = {}
        self.ready = self._send if at_once else self._send_in_turn
        self._at_once = at_once
        self._out = out
        self._ids = ids
        self._mini_batch = mini_batch
        self._residency = residency

    def _send_in_turn(self, demand: Demand) -> None:
        if demand.opened.request.prefilling and not (demand.held is not None and demand.held.hosted):
            self.held_back[demand.opened.visit] = demand.opened
        else:
            self._send(demand)

    def changed(self, opened: LayerVisit) -> None:
        """A load that the visit was waiting for is over. In-turn prefill may have rows to send."""
        if not self._at_once and opened.request.prefilling:
            self.held_back[opened.visit] = opened

    def send_together(self) -> None:
        """In-turn prefill: all rows of a layer none of whose loads is under way."""
        for opened in self.held_back.values():
            ready = [n for n in opened.demands.values() if n.held is not None and n.confirmed and not n.sent]
            if all(demand.held is not None and demand.held.loaded for demand in ready):
                for demand in ready:
                    self._send(demand)
        self.held_back.clear()

    def _send(self, demand: Demand) -> None:
        """The worker holds the rows until its load has ended."""
        held = demand.held
        if held is None:
            return
        demand.sent = True
        if not held.hosted:
            self._residency.used(held.worker, demand.expert, demand.hit, demand.importance.score)
        rows = demand.rows
        size = self._mini_batch or max(LEAST_ROWS, -(-rows // MOST_PARTS))
        for start in range(0, rows, size):
            stop, evict = start + size, False
            if stop >= rows:
                stop, evict = rows, not held.keeps and not held.hosted
            call = next(self._ids)
            demand.calls.append(call)
            self.owed[call] = demand
            self._out.append(
                t.Compute(held.worker, held.slot, demand.expert, call, demand.opened.visit, start, stop, evict)
            )

    def answered(self, call: int) -> Demand | None:
        """The demand that has all its answers with this one."""
        demand = self.owed.pop(call, None)
        if demand is None:
            return None
        demand.calls.remove(call)
        return None if demand.calls else demand

    def forget(self, demand: Demand) -> None:
        """What is still said of it is not heard."""
        for call in demand.calls:
            self.owed.pop(call, None)
        demand.calls.clear()
        demand.sent = False
