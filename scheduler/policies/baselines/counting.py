"""Counts of activations as arrays, for the predictors that learn from past gates alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.float32]


def heaviest(weights: Counts, count: int) -> tuple[int, ...]:
    """The experts of the greatest weight, at most `count`, none of weight 0. Of equal ones the lower number first."""
    order = np.argsort(-weights, kind="stable")[:count]
    return tuple(int(e) for e in order if weights[e] > 0)


def row_counts(rows: Mapping[int, int], experts: int) -> Counts:
    """`rows`, chosen expert -> its rows, as an array [experts]."""
    counts = np.zeros(experts, dtype=np.float32)
    counts[list(rows)] = list(rows.values())
    return counts
