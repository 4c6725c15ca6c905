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
    announced: int = -1
    """The last decode pass that was announced to the shadow."""
    settled: int = -1
    """The last announced pass after which the shadow has had nothing more to predict."""
    since: float = -math.inf
    """The shadow's last known time in this request."""


class ExpectedPredictions:
    """Hears of each message to the shadow, and of what the shadow sends at the moment of its arrival. Thread-safe.

    After an announcement the shadow predicts the pass, or what it has predicted wrongly of it, and may then run ahead.
    It says when it has nothing more to predict before the next announcement.
    """

    def __init__(self, profile: Profile) -> None:
        self._step_s = profile.shadow_layer_s + profile.hop_s
        self._lock = threading.Lock()
        self._requests: dict[int, _Request] = {}

    def on_opened(self, request: int) -> None:
        with self._lock:
            self._requests[request] = _Request()

    def on_closed(self, request: int) -> None:
        with self._lock:
            self._requests.pop(request, None)

    def on_announced(self, request: int, step: int, at: float) -> None:
        """Decode pass `step` was announced; the announcement reaches the shadow at `at`."""
        with self._lock:
            state = self._requests.get(request)
            if state is not None:
                if state.settled >= state.announced:
                    state.since = max(state.since, at)
                state.announced = max(state.announced, step)

    def on_progress(self, request: int, settled: int | None, at: float) -> None:
        """The shadow has sent a prediction at `at`, or has had none to send for a layer. `settled`: it has nothing more
        to predict as long as no pass after that one is announced."""
        with self._lock:
            state = self._requests.get(request)
            if state is not None:
                state.since = max(state.since, at)
                if settled is not None:
                    state.settled = max(state.settled, settled)

    def until(self) -> float:
        """No prediction that counts before this moment is outstanding."""
        with self._lock:
            due = [state.since + self._step_s for state in self._requests.values() if state.settled < state.announced]
        return min(due, default=math.inf)

    def give_up(self) -> None:
        """Outstanding predictions do not come: expect none until the next announcement."""
        with self._lock:
            for state in self._requests.values():
                state.settled = max(state.settled, state.announced)
