"""Which experts compute a row: the model's own choice, or one that spares loads. Pure functions of scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from scheduler.errors import ConfigError
from scheduler.policies.predictors.base import Scores

Chosen = tuple[tuple[int, ...], ...]
"""For each row, the experts that compute it, best first."""


class Router(Protocol):
    """Asked at every gate of a decode pass. `exact`: the answer is the model's own. `wants_scores`: it reads scores."""

    @property
    def exact(self) -> bool: ...

    @property
    def wants_scores(self) -> bool: ...

    def route(self, chosen: Chosen, scores: Scores, resident: Collection[int]) -> Chosen:
        """For each row, which experts compute it: at least one, at most as many as were `chosen`, none twice.

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
    is replaced by one that nearly was chosen and is.

    With beta a row's (k+1)-th score: chosen experts over (1 + alpha) beta are top-score and stay, those of all rows are
    the set C. The other chosen ones are low-score: one that is resident or in C stays; each of the rest makes room for
    an alternative, an expert not chosen with a score of at least (1 - alpha) beta that is resident or in C, the highest
    scores first. Where there are fewer alternatives, the highest low scores stay. At alpha 0 nothing changes.

    `batch_aware` (5.4): a low-score expert that is left, neither resident nor in C, is replaced by an alternative that
    other rows need anyway, resident or not, if more rows then compute that one than now compute the first.

    Where the printed pseudocode and the text differ, the text holds: as printed, low-score experts that are resident
    are replaced, too, the (k+1)-th expert itself counts as low-score (so that k + 1 are chosen), and a score of exactly
    (1 + alpha) beta is in no set (here: low). Assumed: rows whose choice is not the top-k of their scores (families
    that choose by biased scores) keep it, all of it in C. In 5.4, rows take their turns, and a row gives up the expert
    that the fewest rows compute first, of such the lowest score.
    """

    wants_scores = True

    def __init__(self, alpha: float = 0.3, batch_aware: bool = True) -> None:
        if not 0 <= alpha <= 1:
            raise ConfigError(f"--alpha is {alpha}; allowed for the router expert-cache: 0 (the model's choice) to 1")
        self.alpha = alpha
        self.batch_aware = batch_aware
        self.exact = alpha == 0

    def route(self, chosen: Chosen, scores: Scores, resident: Collection[int]) -> Chosen:
        if self.exact or len(scores) != len(chosen):
            return chosen
        rows = [_classed(mine, row, self.alpha) for mine, row in zip(chosen, scores, strict=True)]
        at_hand = {e for row in rows for e in row.top}.union(resident)
        routed = [row.replaced(at_hand) for row in rows]
        if self.batch_aware and len(rows) > 1:
            _gather(rows, routed, at_hand)
        return tuple(tuple(experts) for experts in routed)


class _Row(NamedTuple):
    """Each in the order of scores, the best first."""

    top: Sequence[int]
    low: Sequence[int]
    alternatives: Sequence[int]

    def replaced(self, at_hand: Collection[int]) -> list[int]:
        kept = [e for e in self.low if e in at_hand]
        costly = [e for e in self.low if e not in at_hand]
        instead = [e for e in self.alternatives if e in at_hand][: len(costly)]
        stay = {*kept, *costly[: len(costly) - len(instead)]}
        return [*self.top, *(e for e in self.low if e in stay), *instead]


def _classed(chosen: Sequence[int], scores: Sequence[float], alpha: float) -> _Row:
    others = [e for e in range(len(scores)) if e not in chosen]
    beta = max((scores[e] for e in others), default=0.0)
    if not others or not 0 <= beta <= min(scores[e] for e in chosen):
        return _Row(chosen, (), ())
    ranked = sorted(chosen, key=lambda e: -scores[e])  # stable: the gate's own order where equal
    top = [e for e in ranked if scores[e] > (1 + alpha) * beta]
    near = [e for e in others if scores[e] >= (1 - alpha) * beta]
    return _Row(top, ranked[len(top) :], sorted(near, key=lambda e: -scores[e]))


def _gather(rows: Sequence[_Row], routed: Sequence[list[int]], at_hand: Collection[int]) -> None:
    """Section 5.4. A replacement makes the sum of squares of rows an expert has grow, and no expert is new."""
    needed = Counter(e for experts in routed for e in experts)
    for row, experts in zip(rows, routed, strict=True):
        costly = [e for e in reversed(row.low) if e in experts and e not in at_hand]
        for low in sorted(costly, key=lambda e: needed[e]):
            near = [e for e in row.alternatives if e not in experts]
            other = max(near, key=lambda e: needed[e], default=low)
            if other != low and needed[other] + 1 > needed[low]:
                experts.remove(low)
                experts.append(other)
                needed[low] -= 1
                needed[other] += 1
        best_first = [*row.top, *row.low, *row.alternatives]
        experts.sort(key=best_first.index)


class Skip:
    """A row does without its least experts as long as what they weigh together stays under `threshold` of what all that
    it chose weigh; the best is never skipped (AdapMoE, "adaptive expert gating").

    AdapMoE skips the second of two where its part of the weight is small: the error of dropping a part 1 - a of the
    weight is about (1 - a)^2 times a layer's sensitivity. Assumed: one threshold for all layers, as in its released
    runtime, since a layer's sensitivity (the trace of a Fisher matrix) wants gradients; of more than two experts the
    dropped parts are added; resident experts are skipped like others.
    """

    wants_scores = True

    def __init__(self, threshold: float = 0.2) -> None:
        if not 0 <= threshold <= 1:
            raise ConfigError(f"--alpha is {threshold}; allowed for the router skip: 0 (nothing is skipped) to 1")
        self.threshold = threshold
        self.exact = threshold == 0

    def route(self, chosen: Chosen, scores: Scores, resident: Collection[int]) -> Chosen:
        if self.exact or len(scores) != len(chosen):
            return chosen
        return tuple(self._row(mine, row) for mine, row in zip(chosen, scores, strict=True))

    def _row(self, chosen: tuple[int, ...], scores: Sequence[float]) -> tuple[int, ...]:
        spare = self.threshold * sum(scores[e] for e in chosen)
        ascending = sorted(reversed(chosen), key=lambda e: scores[e])
        skipped = set()
        for expert in ascending[:-1]:
            spare -= scores[expert]
            if not spare > 0:
                break
            skipped.add(expert)
        return tuple(e for e in chosen if e not in skipped)
