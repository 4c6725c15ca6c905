"""What the shadow still owes the main node, in emulated time.

On a machine that is late, a prediction may come behind a gate that counts as fired after it. Before such a gate is
taken the agenda therefore waits, for a while, until nothing more can come that counts before it. What is lost is the
machine's time, not the order: a run that the machine can keep up with decides as the simulator does.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

from scheduler.timing.profile import Profile


@dataclass(slots=True)
class _Owing:
    """One request. `announced`, `predicted`: positions of the last pass announced to the shadow, and of the last that
    it has predicted whole; `since`: the shadow's last known time in it."""

    prompt_tokens: int
    announced: int = -1
    predicted: int = -1
    since: float = -math.inf


class ExpectedPredictions:
    """Told what is sent to the shadow, and of what has come from it, the moment it is here. Thread-safe.

    `last`: the model's last MoE layer.
    """

    def __init__(self, profile: Profile, last: int) -> None:
        self._step_s = profile.shadow_layer_s + profile.hop_s
        self._last = last
        self._lock = threading.Lock()
        self._owing: dict[int, _Owing] = {}

    def opened(self, request: int, prompt_tokens: int) -> None:
        with self._lock:
            self._owing[request] = _Owing(prompt_tokens)

    def closed(self, request: int) -> None:
        with self._lock:
            self._owing.pop(request, None)

    def announced(self, request: int, step: int, at: float) -> None:
        """Decode pass `step` may be predicted; the shadow hears of it at `at`."""
        with self._lock:
            owing = self._owing.get(request)
            if owing is not None:
                owing.announced = max(owing.announced, owing.prompt_tokens + step)
                owing.since = max(owing.since, at)

    def predicted(self, request: int, position: int, layer: int, at: float) -> None:
        """A prediction is here, which the shadow sent at `at`."""
        with self._lock:
            owing = self._owing.get(request)
            if owing is not None:
                owing.since = max(owing.since, at)
                if layer == self._last:
                    owing.predicted = max(owing.predicted, position)

    def until(self) -> float:
        """Nothing that counts before this moment is still to come."""
        with self._lock:
            due = [owing.since + self._step_s for owing in self._owing.values() if owing.predicted < owing.announced]
        return min(due, default=math.inf)

    def give_up(self) -> None:
        """It does not come: nothing is expected until the next announcement."""
        with self._lock:
            for owing in self._owing.values():
                owing.predicted = max(owing.predicted, owing.announced)
