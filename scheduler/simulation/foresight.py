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
    """`post`: passes an event to the core, carries out its commands and returns them."""

    def __init__(self, kind: Foresight | None, events: EventHeap, post: Callable[[t.Event], list[t.Command]]) -> None:
        self._kind = kind
        self._events = events
        self._post = post
        self._foreseen: list[t.Foreseen] = []
        self._layer_s = 0.0
        self._resident: tuple[int, ...] = ()
        self._unanswered: set[int] = set()  # calls of resident experts that the scores depend on

    def fire(self, gate: t.GateFired, foreseen: list[t.Foreseen], layer_s: float) -> None:
        """A gate with scores fires. `foreseen`: the events that follow from it. `layer_s`: seconds per layer in this
        pass."""
        self._foreseen = foreseen if self._kind is not None else []
        self._layer_s = layer_s
        self._resident, self._unanswered = (), set()
        commands = self._post(gate)
        if self._kind == "attention":
            calls = (command for command in commands if isinstance(command, t.Compute))
            self._unanswered = {call.call_id for call in calls if call.expert[1] in self._resident}
        if not self._unanswered:
            self._send()

    def route(self, command: t.Route) -> None:
        self._resident = command.resident

    def answered(self, call_id: int) -> None:
        """The answer of a computation has arrived."""
        if self._unanswered:
            self._unanswered.discard(call_id)
            if not self._unanswered:
                self._send()

    def _send(self) -> None:
        for event in self._foreseen:
            if self._kind == "attention":
                self._events.at(self._events.now + self._layer_s, self._post, event)
            else:
                self._post(event)
