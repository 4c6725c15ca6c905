"""Which experts compute a row: the model's own choice, or one that saves loads. Pure functions of scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from scheduler.policies.predictors.base import Scores

Chosen = tuple[tuple[int, ...], ...]
"""For each row, the experts that compute it, best first."""


class Router(Protocol):
    """Called at every gate of a decode pass."""

    @property
    def exact(self) -> bool:
        """The answer is the model's own."""

    @property
    def wants_scores(self) -> bool:
        """It reads the gates' scores."""

    def route(self, chosen: Chosen, scores: Scores, resident: Collection[int]) -> Chosen:
        """For each row, the experts that compute it: at least one, at most as many as `chosen`, none twice.

        `resident`: experts of this layer whose bytes are in a slot.
        """


class TopK:
    """The model's own top-k."""

    exact = True
    wants_scores = False

    def route(self, chosen: Chosen, scores: Scores, resident: Collection[int]) -> Chosen:
        return chosen


class ExpertCache:
    """The expert-cache router of importance (5.1, Algorithm 1): a chosen expert that matters little and is not resident
    is replaced by a resident one that was nearly chosen.

    Let beta be a row's (k+1)-th score. Chosen experts over (1 + alpha) beta are top-score and stay; those of all rows
    are the set C. The other chosen experts are low-score. A low-score expert that is resident or in C stays. Each of
    the rest is replaced by an alternative: an expert that was not chosen, has a score of at least (1 - alpha) beta and
    is resident or in C, the highest scores first. If there are fewer alternatives, the highest low scores stay. At
    alpha 0 nothing changes.

    `batch_aware` (5.4): a low-score expert that is left, neither resident nor in C, is replaced by an alternative that
    other rows need anyway, resident or not, if more rows then compute that one than now compute the first.

    If the printed pseudocode and the text differ, the text holds. As printed, resident low-score experts are
    replaced too; the (k+1)-th expert itself counts as low-score, so that k + 1 are chosen; and a score of exactly
    (1 + alpha) beta is in no set (here: low). Assumed: rows whose choice is not the top-k of their scores (families
    that choose by biased scores) keep it, all of it in C. In 5.4 rows take turns, and a row first gives up the expert
    that the fewest rows compute, of those the one with the lowest score.
    """

    wants_scores = True

    def __init__(self, alpha: float = 0.3, batch_aware: bool = True) -> None:
        self.alpha = alpha
        self.batch_aware = batch_aware
        self.exact = alpha == 0

    def route(self, chosen: Chosen, scores: Scores, resident: Collection[int]) -> Chosen:
        if self.exact or len(scores) != len(chosen):
            return chosen
        rows = [_classify(experts, row, self.alpha) for experts, row in zip(chosen, scores, strict=True)]
        available = {e for row in rows for e in row.top}.union(resident)
        routed = [row.replace_missing(available) for row in rows]
        if self.batch_aware and len(rows) > 1:
            _share_loads(rows, routed, available)
        return tuple(tuple(experts) for experts in routed)


class _Row(NamedTuple):
    """A row's experts by class, each in the order of scores, best first."""

    top: Sequence[int]
    low: Sequence[int]
    alternatives: Sequence[int]

    def replace_missing(self, available: Collection[int]) -> list[int]:
        kept = [e for e in self.low if e in available]
        missing = [e for e in self.low if e not in available]
        substitutes = [e for e in self.alternatives if e in available][: len(missing)]
        stay = {*kept, *missing[: len(missing) - len(substitutes)]}
        return [*self.top, *(e for e in self.low if e in stay), *substitutes]


def _classify(chosen: Sequence[int], scores: Sequence[float], alpha: float) -> _Row:
    others = [e for e in range(len(scores)) if e not in chosen]
    beta = max((scores[e] for e in others), default=0.0)
    if not others or not 0 <= beta <= min(scores[e] for e in chosen):
        return _Row(chosen, (), ())
    ranked = sorted(chosen, key=lambda e: -scores[e])  # stable: the gate's own order if equal
    top = [e for e in ranked if scores[e] > (1 + alpha) * beta]
    near = [e for e in others if scores[e] >= (1 - alpha) * beta]
    return _Row(top, ranked[len(top) :], sorted(near, key=lambda e: -scores[e]))


def _share_loads(rows: Sequence[_Row], routed: Sequence[list[int]], available: Collection[int]) -> None:
    """Section 5.4, in place. Each replacement increases the sum over experts of rows squared, and no expert is new."""
    needed = Counter(e for experts in routed for e in experts)
    for row, experts in zip(rows, routed, strict=True):
        missing = [e for e in reversed(row.low) if e in experts and e not in available]
        for low in sorted(missing, key=lambda e: needed[e]):
            near = [e for e in row.alternatives if e not in experts]
            other = max(near, key=lambda e: needed[e], default=low)
            if other != low and needed[other] + 1 > needed[low]:
                experts.remove(low)
                experts.append(other)
                needed[low] -= 1
                needed[other] += 1
        best_first = [*row.top, *row.low, *row.alternatives]
        experts.sort(key=best_first.index)
