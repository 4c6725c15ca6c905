"""Predictions that the shadow still owes the main node, in emulated time.

On a late machine a prediction may arrive behind a gate that counts as fired after it. So before such a gate is taken
the agenda waits, for a while, until nothing that counts before the gate can arrive any more. The machine loses time,
the order stays: a run that the machine can keep up with decides as the simulator does.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

from scheduler.timing.profile import Profile


@dataclass(slots=True)
class _Request:
    prompt_tokens: int
    announced: int = -1
    """Position of the last pass that was announced to the shadow."""
    predicted: int = -1
    """Position of the last pass that the shadow has predicted to its last layer."""
    since: float = -math.inf
    """The shadow's last known time in this request."""


class ExpectedPredictions:
    """Hears of each message to the shadow, and of each prediction at the moment of its arrival. Thread-safe.

    `last_layer`: the model's last MoE layer.
    """

    def __init__(self, profile: Profile, last_layer: int) -> None:
        self._step_s = profile.shadow_layer_s + profile.hop_s
        self._last_layer = last_layer
        self._lock = threading.Lock()
        self._requests: dict[int, _Request] = {}

    def opened(self, request: int, prompt_tokens: int) -> None:
        with self._lock:
            self._requests[request] = _Request(prompt_tokens)

    def closed(self, request: int) -> None:
        with self._lock:
            self._requests.pop(request, None)

    def announced(self, request: int, step: int, at: float) -> None:
        """Decode pass `step` may be predicted; the announcement reaches the shadow at `at`."""
        with self._lock:
            state = self._requests.get(request)
            if state is not None:
                state.announced = max(state.announced, state.prompt_tokens + step)
                state.since = max(state.since, at)

    def predicted(self, request: int, position: int, layer: int, at: float) -> None:
        """A prediction has arrived that the shadow sent at `at`."""
        with self._lock:
            state = self._requests.get(request)
            if state is not None:
                state.since = max(state.since, at)
                if layer == self._last_layer:
                    state.predicted = max(state.predicted, position)

    def until(self) -> float:
        """No prediction that counts before this moment is outstanding."""
        with self._lock:
            due = [state.since + self._step_s for state in self._requests.values() if state.predicted < state.announced]
        return min(due, default=math.inf)

    def give_up(self) -> None:
        """Outstanding predictions do not come: expect none until the next announcement."""
        with self._lock:
            for state in self._requests.values():
                state.predicted = max(state.predicted, state.announced)
