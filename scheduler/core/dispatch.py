"""Which rows are sent to be computed, and which answers are owed."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.core.commands import Commands
from scheduler.core.state import Demand, LayerVisit, State
from scheduler.policies.precision import Precision
from scheduler.policies.residency.base import Residency

LEAST_ROWS, MOST_PARTS = 16, 8
"""Mini-batches, where no size is given: parts of 16 rows overlap transfers and computations best on the paper's testbed
(`scripts/papers/sweep_minibatch.py`), and each part costs a message and a start: so there are at most eight. A host
place gets all rows at once: nothing travels to it, and each part would read the expert's weights from memory again."""


class RowDispatcher:
    """Sends the rows of confirmed demands.

    `residencies`: of slots, and of host memory. `precision`: says in which form a demand needs its expert.
    `mini_batch`: most rows in one part of prefill; None: see `LEAST_ROWS`. `together`: in prefill a layer's rows are
    sent once none of its loads is in flight (prefill `in-turn`), else each demand's as soon as it has a slot.
    """

    def __init__(
        self,
        state: State,
        commands: Commands,
        residencies: Sequence[Residency],
        precision: Precision,
        mini_batch: int | None,
        together: bool,
    ) -> None:
        self._state = state
        self._commands = commands
        self._residencies = residencies
        self._precision = precision
        self._mini_batch = mini_batch
        self._together = together

    def on_ready(self, demand: Demand) -> None:
        """A confirmed demand has a slot, or is hosted: its rows may be sent."""
        if self._together and demand.visit.request.prefilling and demand.state != "hosted":
            self._state.held_back[demand.visit.id] = demand.visit
        else:
            self._send(demand)

    def on_load_over(self, visit: LayerVisit) -> None:
        """A load of the visit has ended or was given up: rows that were held back may be sent."""
        if self._together and visit.request.prefilling:
            self._state.held_back[visit.id] = visit

    def flush(self) -> None:
        """Send what was held back for layers that have no load in flight any more."""
        held_back = self._state.held_back
        for visit in held_back.values():
            demands = [d for d in visit.demands.values() if d.confirmed and d.entry is not None and not d.calls]
            if all(demand.state == "ready" for demand in demands):
                for demand in demands:
                    self._send(demand)
        held_back.clear()

    def _send(self, demand: Demand) -> None:
        """In parts; the worker holds them until the load has ended. An expert that is not kept is evicted after the
        last part of the last demand that shares it."""
        entry, rows = demand.entry, demand.rows
        slot, frees = 0, False
        if entry is not None:
            slot, users = entry.slot, entry.users
            frees = not entry.keeps and (len(users) == 1 or all(one is demand or one.calls for one in users))
            if frees:
                entry.leaving, entry.last = True, demand
            form = self._precision.form(demand.importance)
            for residency in self._residencies:
                residency.on_used(entry.worker, demand.expert, demand.hit, form)
        own = rows if entry is None else max(LEAST_ROWS, -(-rows // MOST_PARTS))
        size = self._mini_batch or own
        for start in range(0, rows, size):
            stop = start + size if start + size < rows else rows
            call_id = self._commands.compute(demand, slot, start, stop, frees and stop == rows)
            demand.calls.append(call_id)
            self._state.calls[call_id] = demand

    def on_answered(self, call_id: int) -> Demand | None:
        """One call has been answered. Returns its demand when that was the last of its calls."""
        demand = self._state.calls.pop(call_id, None)
        if demand is None:
            return None
        demand.calls.remove(call_id)
        return None if demand.calls else demand

    def forget(self, demand: Demand) -> None:
        """Ignore the answers that its worker still owes."""
        for call_id in demand.calls:
            self._state.calls.pop(call_id, None)
        demand.calls.clear()
