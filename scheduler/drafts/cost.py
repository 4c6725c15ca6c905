"""What a further row costs a step, learnt from steps."""

from __future__ import annotations

import math

_RATE = 1 / 16
"""Weight of the newest step in the mean."""
_STALE = 1 / 1024
"""Share of what is known of rows that is forgotten with a step that says nothing about them."""
_EXPERT_SHARE, _ROW_SHARE = 0.1, 0.01
"""Before they were measured: the time of a further expert of a layer, and of a further row, over that of a step of one
row."""
_EXPERT_WEIGHT, _ROW_WEIGHT = 0.5, 5.0
"""How much that counts, in squares of experts and of rows. What both could explain is put down to experts, so that
longer blocks, of which there are no more than all, are tried."""


class StepCost:
    """The seconds of a step by its number of rows, of all requests together: mean + a * (experts - mean experts) +
    b * (rows - mean rows).

    Loads are bound by the different experts of a layer that the rows need, as many as they would choose independently.
    Means follow the last steps. Slopes are a least-squares fit, which forgets as steps with quite another number of
    rows come: those of always about the same number say little about them.
    """

    def __init__(self, experts: int, top_k: int) -> None:
        """`experts`: of a layer, E."""
        self._experts, self._missed = experts, 1 - top_k / experts
        self._mean = (0.0, 0.0, 0.0)  # experts, rows, seconds
        self._squares = (0.0, 0.0, 0.0)  # sums over steps, from the mean: experts^2, experts * rows, rows^2
        self._products = (0.0, 0.0)  # likewise experts * seconds, rows * seconds
        self._slopes: tuple[float, float] | None = None

    @property
    def is_known(self) -> bool:
        """A step was measured."""
        return self._mean[2] > 0

    def experts(self, rows: float) -> float:
        """Different experts of a layer that so many rows need."""
        return self._experts * (1 - math.pow(self._missed, rows))

    def on_step_ended(self, rows: int, seconds: float) -> None:
        """A step that only decodes has ended."""
        self._slopes = None
        if not self.is_known:
            self._mean = self.experts(rows), float(rows), seconds
            return
        x, y, s = self.experts(rows) - self._mean[0], rows - self._mean[1], seconds - self._mean[2]
        keep = 1 - max(_STALE, _RATE * min(1.0, (2 * y / self._mean[1]) ** 2))
        xx, xy, yy = self._squares
        self._squares = keep * xx + x * x, keep * xy + x * y, keep * yy + y * y
        self._products = keep * self._products[0] + x * s, keep * self._products[1] + y * s
        self._mean = self._mean[0] + _RATE * x, self._mean[1] + _RATE * y, self._mean[2] + _RATE * s

    def seconds(self, rows: int) -> float:
        """Of a step of so many rows. There must have been one."""
        if self._slopes is None:
            self._slopes = self._fit()
        of_experts, of_rows = self._slopes
        return self._mean[2] + of_experts * (self.experts(rows) - self._mean[0]) + of_rows * (rows - self._mean[1])

    def _fit(self) -> tuple[float, float]:
        """Seconds of a further expert, of a further row. None is negative, nor is a step without rows."""
        experts, rows, seconds = self._mean
        first = self.experts(1)
        alone = seconds / (1 + _EXPERT_SHARE * (experts - first) + _ROW_SHARE * (rows - 1))
        xx, xy, yy = self._squares[0] + _EXPERT_WEIGHT, self._squares[1], self._squares[2] + _ROW_WEIGHT
        xs = self._products[0] + _EXPERT_WEIGHT * _EXPERT_SHARE * alone
        ys = self._products[1] + _ROW_WEIGHT * _ROW_SHARE * alone
        whole = xx * yy - xy * xy
        a, b = (xs * yy - ys * xy) / whole, (ys * xx - xs * xy) / whole
        if a < 0:
            a, b = 0.0, max(0.0, ys / yy)
        elif b < 0:
            a, b = max(0.0, xs / xx), 0.0
        scale = min(1.0, seconds / (a * experts + b * rows)) if a or b else 1.0
        return a * scale, b * scale
