"""Follows which experts gates choose, while somebody watches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from main_node.activity import HIT, HOST, IN_TIME, LATE, MISSED, ExpertAccess
from scheduler import types as t
from scheduler.core.machine import Core
from scheduler.core.state import Demand
from wire import runtime

ACCESSES_S = 250
"""Accesses that are followed in a second, about: where there are more, not every step is followed. It bounds the cost
to some thousandths of a core, most of which is what the page is sent, and is more than an eye can tell apart."""
KEPT = 8192
"""Accesses that are kept for those who ask; and the most of one step, of which a long prompt has many."""
WATCHED_S = 5.0
"""How long after a reading it goes on."""


class ActivityWatch:
    """An observer of the engine, which holds its lock. From a reading on, until `WATCHED_S` after the last."""

    def __init__(self, core: Core, leave: Callable[[], None]) -> None:
        """`leave`: called when it is to observe no more."""
        self._core, self._leave = core, leave
        self._until = 0.0
        self.count = 0
        """Of accesses so far."""
        self.predictions = 0
        self._accesses: deque[ExpertAccess] = deque(maxlen=KEPT)
        self._follows = False
        """This step."""
        self._next_s = 0.0
        """When a step is followed again."""
        self._step_count = 0
        self._gates: list[t.Visit] = []
        """Whose experts are not known yet: gates of a step's passes count once all have fired."""

    def read(self, since: int | None) -> tuple[ExpertAccess, ...]:
        """Those after `since`. None, or the count of another main node: none."""
        self._until = runtime.monotonic() + WATCHED_S
        new = self.count - since if since is not None else 0
        new = min(new, len(self._accesses)) if new > 0 else 0
        return tuple(self._accesses)[len(self._accesses) - new :] if new else ()

    def on_handled(self, event: t.Event, now: float, commands: list[t.Command]) -> None:
        """See `Observer`."""
        kind = type(event)
        if kind is t.GateFired:
            if self._follows:
                self._gates.append(event.visit)  # type: ignore[union-attr]
                self._follow_gates()
        elif kind is t.Predicted:
            self.predictions += 1
        elif kind is t.StepStarted:
            self._begin_step(runtime.monotonic())

    def _begin_step(self, now: float) -> None:
        self._gates.clear()
        if now >= self._until:
            self._follows = False
            self._leave()
            return
        self._follows = now >= self._next_s
        self._step_count = 0
        if self._follows:
            self._next_s = now

    def _follow_gates(self) -> None:
        left = [visit for visit in self._gates if not self._follow(visit)]
        self._gates = left if len(left) < KEPT else []
        self._follows = self._step_count < KEPT

    def _follow(self, visit: t.Visit) -> bool:
        """False where the experts are not decided yet."""
        demands = self._core.demands(visit)
        chosen = [demand for demand in demands if demand.confirmed]
        for demand in chosen:
            self._accesses.append(ExpertAccess(*demand.expert, _outcome(demand), demand.worker))
        self.count += len(chosen)
        self._step_count += len(chosen)
        self._next_s += len(chosen) / ACCESSES_S
        return bool(chosen)


def _outcome(demand: Demand) -> int:
    """Of a demand whose gate has just fired."""
    if demand.origin == "host":
        return HOST
    if demand.state == "ready":
        return HIT if demand.hit else IN_TIME
    return MISSED if demand.origin == "gate" and not demand.hit else LATE
