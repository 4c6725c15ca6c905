"""The importance of each expert of a layer for its rows, from the scores that gates gave or are expected to give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.policies.precision import Importance
from scheduler.policies.predictors.base import Scores
from scheduler.policies.predictors.ranking import top_k
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

    def of(self, expert: int) -> Importance:
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
    """`rows`: the gate's choice, expert -> its rows. None: the gate has not fired, and each row needs its k best.

    `chosen`: each row's experts, where they are known. Not all families choose by these scores alone.
    """
    totals: dict[int, float] = {}
    rank: dict[int, int] = {}
    better: dict[int, float] = {}
    counts: Counter[int] = Counter()
    known = len(chosen) == len(scores)
    for number, row in enumerate(scores):
        best = sorted(chosen[number], key=lambda e: (-row[e], e)) if known else top_k(row, k)
        before, total = 0.0, sum(row[expert] for expert in best)
        for place, expert in enumerate(best):
            better[expert] = min(better.get(expert, 1.0), before / total if total else 0.0)
            before += row[expert]
            counts[expert] += 1
            totals[expert] = totals.get(expert, 0.0) + row[expert]
            rank[expert] = min(rank.get(expert, place), place)
    mean = {expert: totals[expert] / counts[expert] for expert in counts}
    return LayerImportance(prefill, rows is None, counts if rows is None else rows, mean, rank, better)
