"""How long a layer of a decode pass takes without stalls, as measured while decoding."""

from __future__ import annotations


class Tempo:
    """From gate to gate, without the stalls between them: attention, gate and experts (Fate section 4.3).

    `layer_s`: the mean of all layers so far; 0 before the first.
    """

    def __init__(self) -> None:
        self._sum = 0.0
        self._count = 0
        self._last: tuple[float, float] | None = None

    @property
    def layer_s(self) -> float:
        return self._sum / self._count if self._count else 0.0

    def begin(self) -> None:
        """A pass begins: the time until its first gate is not a layer's."""
        self._last = None

    def gate(self, now: float, stall_s: float) -> None:
        """A gate has fired; `stall_s`: all stalls of its request so far."""
        if self._last is not None:
            before, stalled = self._last
            self._sum += max(0.0, now - before - (stall_s - stalled))
            self._count += 1
        self._last = now, stall_s
