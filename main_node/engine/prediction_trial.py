"""Whether the main model's predictions save more time than they cost, by trying both."""

from __future__ import annotations

from statistics import median

WARM = 16
"""Decode steps before the first trial: caches fill."""
BLOCK = 5
"""Steps in a row that are alike: with predictions, or without."""
ENOUGH = 32
"""Steps of each kind, of one number of rows, that decide."""
KINDS = 8
"""Numbers of rows whose times are kept: the most frequent ones."""
HOLDS = 1000
"""Steps for which an outcome holds. Then a new trial follows."""
CLEARLY = 1.03
"""What the median step takes longer if predictions cost too much. On a busy machine less may be chance."""


class PredictionTrial:
    """Of decode steps. In a trial, blocks of steps with predictions and without take turns. The first step of a block
    is not counted, since the block before still loads for it. Only steps of equally many rows are compared: those of
    the number of rows that first has enough of both kinds. Afterwards predictions are made unless the median step took
    clearly longer with them.

    `weighs`: otherwise predictions are always made.
    """

    def __init__(self, weighs: bool) -> None:
        self.weighs = weighs
        self.predicts = True
        """In the steps to come."""
        self.step_s: tuple[float, float] | None = None
        """Median seconds of a step with predictions and without, of the last trial."""
        self._rest, self._steps = WARM, 0
        self._times: dict[int, dict[bool, list[float]]] = {}

    def on_step(self, rows: int, seconds: float) -> None:
        """A decode step has ended."""
        if not self.weighs:
            return
        if self._rest:
            self._rest -= 1
            return
        if self._steps % BLOCK and self._has_enough(rows, seconds):
            return
        self._steps += 1
        if self._steps % BLOCK == 0:
            self.predicts = not self.predicts

    def _has_enough(self, rows: int, seconds: float) -> bool:
        """Count a step. Whether that has decided the trial."""
        if rows not in self._times and len(self._times) == KINDS:
            del self._times[min(self._times, key=lambda kept: sum(map(len, self._times[kept].values())))]
        times = self._times.setdefault(rows, {True: [], False: []})
        times[self.predicts].append(seconds)
        if min(map(len, times.values())) < ENOUGH:
            return False
        self.step_s = median(times[True]), median(times[False])
        self.predicts = pays(self.step_s)
        self._rest, self._steps, self._times = HOLDS, 0, {}
        return True


def pays(step_s: tuple[float, float]) -> bool:
    """Whether predictions are made after such an outcome."""
    with_s, without_s = step_s
    return with_s <= CLEARLY * without_s
