"""Scores to experts, best first. Of equal scores the lower expert number comes first."""

from __future__ import annotations

from heapq import nlargest
from typing import Any

from scheduler.policies.predictors.base import Scores


def top_k(scores: tuple[float, ...], k: int) -> list[int]:
    """The k best experts of a row, best first."""
    return nlargest(k, range(len(scores)), key=lambda e: (scores[e], -e))


def best_of_rows(table: Any, count: int) -> Any:
    """The experts with the `count` best scores of each row, best first: [rows, count]. `table`: [rows, experts]."""
    import numpy as np  # takes a third of a second, and most commands need none of it

    return np.argsort(-table, axis=1, kind="stable")[:, :count]


def popularity(scores: Scores, count: int) -> tuple[list[int], list[int]]:
    """All experts in the order of popularity, and for each expert how many rows have it among their `count` best.

    Experts with equally many rows are ordered by the sum of their scores. Of one row: its experts by score.
    `scores`: at least one row, all of one length.
    """
    import numpy as np

    table = np.asarray(scores, dtype=np.float64)  # [rows, experts]
    best = best_of_rows(table, count)
    rows = np.bincount(best.ravel(), minlength=table.shape[1])
    order = np.lexsort((-table.sum(axis=0), -rows))
    return order.tolist(), rows.tolist()


def above_percentile(scores: Scores, percentile: float) -> set[int]:
    """Experts whose score in some row exceeds that percentile of the row (numpy's, linear between two scores)."""
    import numpy as np

    table = np.asarray(scores, dtype=np.float64)
    above = table > np.percentile(table, percentile, axis=1, keepdims=True)
    return set(np.flatnonzero(above.any(axis=0)).tolist())
