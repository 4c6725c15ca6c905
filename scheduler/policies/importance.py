"""The importance of each expert of a layer for its rows, from the scores that gates gave or are expected to give."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scheduler.policies.precision import Importance
from scheduler.policies.predictors.base import Scores
from scheduler.policies.predictors.ranking import best_of_rows
from scheduler.policies.routers import Chosen

_UNRANKED = 1 << 20


@dataclass(slots=True)
class LayerImportance:
    """What is known of each expert of a layer. See `Importance` for the quantities."""

    prefill: bool
    predicted: bool
    rows: Mapping[int, int] = field(default_factory=dict)
    score: dict[int, float] = field(default_factory=dict)
    rank: dict[int, int] = field(default_factory=dict)
    better: dict[int, float] = field(default_factory=dict)
    _share: dict[int, float] = field(default_factory=dict)

    def importance_of(self, expert: int) -> Importance:
        if not self._share:
            self._share = shares(self.rows)
        return Importance(
            prefill=self.prefill,
            predicted=self.predicted,
            rows=0 if self.predicted else self.rows.get(expert, 0),
            share=self._share.get(expert, 1.0),
            score=self.score.get(expert),
            rank=self.rank.get(expert, _UNRANKED),
            better=self.better.get(expert),
        )


def shares(rows: Mapping[int, int]) -> dict[int, float]:
    """Expert -> the part of all rows that more popular experts have (Fate 4.5). `rows`: expert -> its rows."""
    total, before, share = sum(rows.values()), 0, {}
    for expert in sorted(rows, key=lambda e: (-rows[e], e)):
        share[expert] = before / total if total else 0.0
        before += rows[expert]
    return share


def importance_of(
    scores: Scores, k: int, prefill: bool, rows: Mapping[int, int] | None = None, chosen: Chosen = ()
) -> LayerImportance:
    """`scores`: rows of one length, or none. `rows`: the gate's choice, expert -> its rows. None: the gate has not
    fired, and each row needs its k best.

    `chosen`: each row's experts, if they are known. Not all families choose by these scores alone.
    """
    if not scores:
        return LayerImportance(prefill, rows is None, {} if rows is None else rows)
    import numpy as np  # takes a third of a second, and most commands need none of it

    table = np.asarray(scores, dtype=np.float64)  # [rows, experts]
    best, there = _best(table, k, chosen)
    values = np.where(there, np.take_along_axis(table, best, axis=1), 0.0)  # [rows, places]
    sums = values.cumsum(axis=1)
    before = np.zeros_like(values)
    np.divide(sums[:, :-1], sums[:, -1:], out=before[:, 1:], where=sums[:, -1:] != 0)
    experts, places = best[there], np.nonzero(there)[1]
    size = table.shape[1]
    counts = np.bincount(experts, minlength=size)
    rank, better = np.full(size, _UNRANKED), np.ones(size)
    np.minimum.at(rank, experts, places)
    np.minimum.at(better, experts, before[there])
    named = np.flatnonzero(counts)
    means = np.bincount(experts, values[there], size)[named] / counts[named]

    def by_expert(of_named: Any) -> dict[int, Any]:
        return dict(zip(named.tolist(), of_named.tolist(), strict=True))

    needed = by_expert(counts[named]) if rows is None else rows
    return LayerImportance(
        prefill, rows is None, needed, by_expert(means), by_expert(rank[named]), by_expert(better[named])
    )


def _best(table: Any, k: int, chosen: Chosen) -> tuple[Any, Any]:
    """The experts that each row needs, best first, and which of these places a row has; both [rows, places]. Of equal
    scores the lower expert number comes first. `table`: [rows, experts]."""
    import numpy as np

    if len(chosen) != len(table):
        best = best_of_rows(table, k)
        return best, np.ones(best.shape, dtype=bool)
    lengths = np.array([len(row) for row in chosen])
    there = np.arange(lengths.max()) < lengths[:, None]
    experts = np.full(there.shape, table.shape[1] - 1)  # the places that a row lacks stay last when sorted
    experts[there] = list(itertools.chain.from_iterable(chosen))
    experts.sort(axis=1)
    scores = np.where(there, np.take_along_axis(table, experts, axis=1), -np.inf)
    return np.take_along_axis(experts, best_of_rows(scores, lengths.max()), axis=1), there
