"""Scores to experts, best first. Equal scores: the lower number first."""

from __future__ import annotations

from heapq import nlargest

from scheduler.policies.predictors.base import Scores


def top_k(scores: tuple[float, ...], k: int) -> list[int]:
    """The k best experts of a row, best first; of equal ones the lower number."""
    return nlargest(k, range(len(scores)), key=lambda e: (scores[e], -e))


def popularity(scores: Scores, count: int) -> tuple[list[int], list[int]]:
    """All experts, the most wanted first: by how many rows have one among their `count` best, then by the sum of its
    scores; and how many rows each expert has. Of one row: its experts in the order of their scores.

    `scores`: at least one row, all of one length.
    """
    import numpy as np  # takes a third of a second, and most commands need none of it

    table = np.asarray(scores, dtype=np.float64)
    best = np.argsort(-table, axis=1, kind="stable")[:, :count]
    named = np.bincount(best.ravel(), minlength=table.shape[1])
    order = np.lexsort((-table.sum(axis=0), -named))
    return order.tolist(), named.tolist()


def above_percentile(scores: Scores, percentile: float) -> set[int]:
    """Experts whose score in some row is over that percentile of the row's scores (numpy's, linear between two)."""
    import numpy as np

    table = np.asarray(scores, dtype=np.float64)
    over = table > np.percentile(table, percentile, axis=1, keepdims=True)
    return set(np.flatnonzero(over.any(axis=0)).tolist())
