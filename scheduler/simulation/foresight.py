"""A predictor's foresight on a virtual clock: the times at which the main model's scores for it arrive.

Computing the scores delays nothing, since it is done while the main model waits. Scores of gates arrive with the
previous gate. Scores that need a whole layer (`attention`) arrive one layer's time after the answers of the resident
experts.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler import types as t
from scheduler.policies.predictors.base import Foresight
from scheduler.simulation.events import EventHeap


class SimulatedForesight:
    """`post`: passes an event to the core and carries out its commands."""

    def __init__(self, kind: Foresight | None, events: EventHeap, post: Callable[[t.Event], object]) -> None:
        self._kind = kind
        self._events = events
        self._post = post
        self._foreseen: dict[t.Visit, tuple[list[t.Foreseen], float]] = {}  # with the seconds of a layer
        self._calls: dict[int, t.Visit] = {}  # of resident experts, not answered yet
        self._unanswered: dict[t.Visit, int] = {}  # their number

    def fire(self, gate: t.GateFired, foreseen: list[t.Foreseen], layer_s: float) -> None:
        """A gate with scores fires. `foreseen`: the events that follow from it. `layer_s`: seconds per layer in this
        pass."""
        if self._kind == "attention":
            self._foreseen[gate.visit] = foreseen, layer_s
        self._post(gate)
        if self._kind is not None and self._kind != "attention":
            for event in foreseen:
                self._post(event)

    def on_decided(self, commands: list[t.Command]) -> None:
        """The core has decided where the experts of layers are computed: commands with a `Route`."""
        if self._kind != "attention":
            return
        calls = [command for command in commands if isinstance(command, t.Compute)]
        for route in [command for command in commands if isinstance(command, t.Route)]:
            visit = route.visit
            here = [call.call_id for call in calls if call.visit == visit and call.expert[1] in route.resident]
            if here:
                self._calls |= dict.fromkeys(here, visit)
                self._unanswered[visit] = len(here)
            else:
                self._send(visit)

    def on_answered(self, call_id: int) -> None:
        """The answer of a computation has arrived."""
        visit = self._calls.pop(call_id, None)
        if visit is None:
            return
        self._unanswered[visit] -= 1
        if not self._unanswered[visit]:
            del self._unanswered[visit]
            self._send(visit)

    def _send(self, visit: t.Visit) -> None:
        foreseen, layer_s = self._foreseen.pop(visit, ([], 0.0))
        for event in foreseen:
            self._events.at(self._events.now + layer_s, self._post, event)
