"""Which rows are sent to be computed, and which answers are owed."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler import types as t
from scheduler.core.state import Need, OpenVisit
from scheduler.policies.residency.base import Residency

LEAST_ROWS, MOST_PARTS = 16, 8
"""Mini-batches, where nobody says how large: parts of 16 rows overlap transfers and computations best on the paper's
testbed (`scripts/sweep_minibatch.py`), and each part costs a message and a start, so there are at most eight."""


class Calls:
    """`owed`: needs by the ids of their calls that were not answered. `at_once`: not as Core's prefill `in-turn`.

    `ready` is told of each need that the gate has named and that has its slot: its rows are sent now, or together.
    """

    def __init__(
        self, out: list[t.Command], ids: Iterator[int], mini_batch: int | None, residency: Residency, at_once: bool
    ) -> None:
        self.owed: dict[int, Need] = {}
        self.held_back: dict[t.Visit, OpenVisit] = {}
        self.ready = self._send if at_once else self._send_in_turn
        self._at_once = at_once
        self._out = out
        self._ids = ids
        self._mini_batch = mini_batch
        self._residency = residency

    def _send_in_turn(self, need: Need) -> None:
        if need.opened.request.prefilling and not (need.held is not None and need.held.hosted):
            self.held_back[need.opened.visit] = need.opened
        else:
            self._send(need)

    def changed(self, opened: OpenVisit) -> None:
        """A load that the visit was waiting for is over. In-turn prefill may have rows to send."""
        if not self._at_once and opened.request.prefilling:
            self.held_back[opened.visit] = opened

    def send_together(self) -> None:
        """In-turn prefill: all rows of a layer none of whose loads is under way."""
        for opened in self.held_back.values():
            ready = [n for n in opened.needs.values() if n.held is not None and n.confirmed and not n.sent]
            if all(need.held is not None and need.held.loaded for need in ready):
                for need in ready:
                    self._send(need)
        self.held_back.clear()

    def _send(self, need: Need) -> None:
        """The worker holds the rows until its load has ended."""
        held = need.held
        if held is None:
            return
        need.sent = True
        if not held.hosted:
            self._residency.used(held.worker, need.expert, need.hit, need.wanted.score)
        rows = need.rows
        size = self._mini_batch or max(LEAST_ROWS, -(-rows // MOST_PARTS))
        for start in range(0, rows, size):
            stop, evict = start + size, False
            if stop >= rows:
                stop, evict = rows, not held.keeps and not held.hosted
            call = next(self._ids)
            need.calls.append(call)
            self.owed[call] = need
            self._out.append(
                t.Compute(held.worker, held.slot, need.expert, call, need.opened.visit, start, stop, evict)
            )

    def answered(self, call: int) -> Need | None:
        """The need that has all its answers with this one."""
        need = self.owed.pop(call, None)
        if need is None:
            return None
        need.calls.remove(call)
        return None if need.calls else need

    def forget(self, need: Need) -> None:
        """What is still said of it is not heard."""
        for call in need.calls:
            self.owed.pop(call, None)
        need.calls.clear()
        need.sent = False
