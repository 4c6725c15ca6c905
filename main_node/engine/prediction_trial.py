"""Whether the main model's predictions save more time than they cost, by trying both."""

from __future__ import annotations

from statistics import median

WARM = 16
"""Decode steps before the first trial: caches fill."""
BLOCK, PAIRS = 5, 8
"""Steps that are alike in a row, and pairs of such blocks, one with predictions and one without."""
HOLDS = 1000
"""Steps for which an outcome holds. Then a new trial follows."""


class PredictionTrial:
    """Of decode steps. In a trial, blocks of steps with predictions and without take turns. The first step of a block
    is not counted, since the block before still loads for it. Afterwards predictions are made if the median step took
    no longer with them. A step of another number of rows begins the trial anew, with predictions.

    `weighs`: otherwise predictions are always made.
    """

    def __init__(self, weighs: bool) -> None:
        self.weighs = weighs
        self.predicts = True
        """In the steps to come."""
        self.step_s: tuple[float, float] | None = None
        """Median seconds of a step with predictions and without, of the last trial."""
        self._rest, self._rows = WARM, 0
        self._begin()

    def _begin(self) -> None:
        self.predicts, self._steps = True, 0
        self._times: dict[bool, list[float]] = {True: [], False: []}

    def on_step(self, rows: int, seconds: float) -> None:
        """A decode step has ended."""
        if not self.weighs:
            return
        if self._rest:
            self._rest -= 1
            if not self._rest:
                self._begin()
            return
        if rows != self._rows:
            self._rows = rows
            self._begin()
            return
        if self._steps % BLOCK:
            self._times[self.predicts].append(seconds)
        self._steps += 1
        if self._steps == 2 * PAIRS * BLOCK:
            self._decide()
        elif self._steps % BLOCK == 0:
            self.predicts = not self.predicts

    def _decide(self) -> None:
        with_s, without_s = median(self._times[True]), median(self._times[False])
        self.step_s, self.predicts, self._rest = (with_s, without_s), with_s <= without_s, HOLDS
