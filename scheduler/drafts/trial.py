"""Whether drafts gain time at all: steps with drafts against those that the same requests take without."""

from __future__ import annotations

_MEASURED = 3
"""Steps without drafts before drafts are tried."""
_RATE = 1 / 8
_LOST, _WON = 4.0, 8.0
"""Steps without drafts that drafts may lose before they are put off, and that they may have won in advance."""
_PAUSE, _LONGEST = 192, 1024
"""Steps for which they are put off: twice as many each time, until they have won."""
_BETTER = 0.2
"""They come back at once where that many more of them are right."""


class Trial:
    """Of all requests. What a step costs by its rows is not all: a shadow that drafts what is wrong predicts late."""

    def __init__(self) -> None:
        self._alone: dict[int, tuple[int, float]] = {}  # requests -> steps without drafts, mean seconds
        self._lost = 0.0
        self._pause, self._left = _PAUSE, 0
        self._right = 0.0  # the best acceptance when drafts were put off

    def allows(self, right: float) -> bool:
        """Whether a request may draft whose drafts are `right` with that probability."""
        if sum(steps for steps, _ in self._alone.values()) < _MEASURED:
            return False
        return self._left == 0 or right > self._right + _BETTER

    def on_step_ended(self, requests: int, drafted: bool, right: float, tokens: int, seconds: float) -> None:
        """A step that only decodes has ended. `drafted`: drafts were verified or asked for. `right`: the best
        acceptance of its requests."""
        steps, alone = self._alone.get(requests, (0, 0.0))
        if drafted and self._alone and not steps:
            alone = self._alone[min(self._alone, key=lambda count: abs(count - requests))][1]
        if not drafted:
            self._left = max(0, self._left - 1)
            mean = alone + (seconds - alone) * max(_RATE, 1 / (steps + 1))
            self._alone[requests] = steps + 1, mean
            return
        if not alone:
            return
        self._lost += seconds / alone - tokens / requests
        if self._lost > _LOST:
            self._left, self._right, self._lost = self._pause, right, 0.0
            self._pause = min(2 * self._pause, _LONGEST)
        elif self._lost < -_WON:
            self._lost, self._pause = -_WON, _PAUSE
