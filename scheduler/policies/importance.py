"""How much each expert of a layer is wanted, from the scores that gates gave or are expected to give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.policies.precision import Importance
from scheduler.policies.predictors.base import Scores
from scheduler.policies.predictors.ranking import top_k
from scheduler.policies.routers import Chosen


@dataclass(slots=True)
class LayerImportance:
    """`rows`: how many rows want an expert. `score`: its mean among them. `rank`: its best place among a row's.
    `better`: the least part of a row's chosen weight that better experts of that row have."""

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
        rows = 0 if self.predicted else self.rows.get(expert, 0)
        return Importance(
            self.prefill, self.predicted, rows, self._share.get(expert, 1.0), self.score.get(expert),
            self.rank.get(expert, 1 << 20), self.better.get(expert),
        )  # fmt: skip


def shares(rows: Mapping[int, int]) -> dict[int, float]:
    """For each expert the part of all rows that those computed by more popular ones make up (Fate section 4.5)."""
    total, before, found = sum(rows.values()), 0, {}
    for expert in sorted(rows, key=lambda e: (-rows[e], e)):
        found[expert] = before / total if total else 0.0
        before += rows[expert]
    return found


def importance_of(
    scores: Scores, k: int, prefill: bool, named: Mapping[int, int] | None = None, chosen: Chosen = ()
) -> LayerImportance:
    """`named`: what the gate chose, expert -> rows; None: nothing yet, and each row wants its k best. `chosen`: which
    of them for each row, where that is known: not all families choose by these scores alone."""
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
    return LayerImportance(prefill, named is None, counts if named is None else named, mean, rank, better)
