"""What the gates of one model said and chose over decoded tokens, counted by layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

ALPHA = 0.1
"""An expert is top-score if its score is over (1 + ALPHA) times the best that was not chosen."""


@dataclass(slots=True)
class Layer:
    """Sums over tokens; `followed`: tokens of which the next one is known, too. Lists have a place for each expert, by
    rank (the highest score first) but for `used`, which is by expert."""

    tokens: int
    followed: int
    scores: list[float]
    """By rank: shares of a token's scores, which sum to 1."""
    reused: list[int]
    """By rank: the next token used the expert of this rank."""
    top_score: int
    used: list[int]

    @classmethod
    def empty(cls, experts: int) -> Layer:
        return cls(0, 0, [0.0] * experts, [0] * experts, 0, [0] * experts)

    def add(self, scores: list[float], top_k: int) -> list[int]:
        """A token's scores; experts by rank."""
        order = sorted(range(len(scores)), key=lambda e: -scores[e])
        total = sum(scores)
        for rank, expert in enumerate(order):
            self.scores[rank] += scores[expert] / total
        if top_k < len(order):
            self.top_score += sum(scores[e] > (1 + ALPHA) * scores[order[top_k]] for e in order[:top_k])
        for expert in order[:top_k]:
            self.used[expert] += 1
        self.tokens += 1
        return order

    def follow(self, order: list[int], chosen: Iterable[int]) -> None:
        """The experts by rank of one token, and those that the next one used."""
        named = set(chosen)
        for rank, expert in enumerate(order):
            self.reused[rank] += expert in named
        self.followed += 1

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    def __add__(self, other: Layer) -> Layer:
        def each(one: list[Any], two: list[Any]) -> list[Any]:
            return [a + b for a, b in zip(one, two, strict=True)]

        return Layer(
            self.tokens + other.tokens,
            self.followed + other.followed,
            each(self.scores, other.scores),
            each(self.reused, other.reused),
            self.top_score + other.top_score,
            each(self.used, other.used),
        )


def counted(passes: Iterable[dict[int, list[float]]], experts: int, top_k: int) -> dict[int, Layer]:
    """Of one answer: by layer, from the scores of each token by layer."""
    found: dict[int, Layer] = {}
    before: dict[int, list[int]] = {}
    for scores in passes:
        for layer, of in scores.items():
            mine = found.setdefault(layer, Layer.empty(experts))
            order = mine.add(of, top_k)
            if layer in before:
                mine.follow(before[layer], order[:top_k])
            before[layer] = order
    return found


def popular(used: list[int], share: float = 0.25) -> float:
    """Of all uses, those of the most used experts, as many as `share` of all."""
    most = sorted(used, reverse=True)[: max(1, round(share * len(used)))]
    return sum(most) / sum(used)


def figures(of: Layer, by_domain: list[list[int]], top_k: int) -> dict[str, Any]:
    """A row. `by_domain`: the uses of each domain's answers."""
    scores = [value / of.tokens for value in of.scores]
    reused = [count / of.followed for count in of.reused]
    chosen = sum(scores[:top_k])
    return {
        "tokens": of.tokens,
        "first": scores[0] / chosen,
        "last_chosen": scores[top_k - 1] / chosen,
        "best_left": scores[top_k] / chosen if top_k < len(scores) else None,
        "top_score": of.top_score / of.tokens,
        "reused_first": reused[0],
        "reused_last_chosen": reused[top_k - 1],
        "reused_best_left": reused[top_k] if top_k < len(reused) else None,
        "popular": popular(of.used),
        "popular_in_domain": sum(map(popular, by_domain)) / len(by_domain),
        "again": sum(reused[:top_k]) / top_k,
        "scores": scores,
        "reused": reused,
        "used": of.used,
    }
