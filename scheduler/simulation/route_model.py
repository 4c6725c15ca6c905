"""Models of routes: how a simulated gate chooses experts if no recording says what a real one chose."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from heapq import nlargest

from scheduler.errors import ConfigError
from scheduler.unknown_names import nearest


@dataclass(frozen=True, slots=True)
class RouteModel:
    """The experts of a layer differ in popularity, and those of a token are likely to be the next token's, too.

    A layer's most popular expert has the weight 1, the others less by a constant factor each, `exp(-skew)` over all
    of them. The weight of one that the token before chose is multiplied by `repeat`. A token's experts are drawn one
    after the other by their weights, each at most once.
    """

    skew: float = 0.0
    """0: all experts of a layer are equally popular."""
    repeat: float = 1.0
    """1: the token before makes no difference."""

    def __post_init__(self) -> None:
        if not 0 <= self.skew < math.inf or not 0 < self.repeat < math.inf:
            raise ConfigError(
                f"a route model has skew {self.skew:g} and repeat {self.repeat:g}; allowed: a skew of at least 0, a "
                "repeat of more than 0"
            )

    @property
    def memoryless(self) -> bool:
        """Whether no expert is likelier than another, ever: caches are then all alike."""
        return not self.skew and self.repeat == 1.0

    def weights(self, experts: int, seed: str) -> list[float]:
        """By expert. `seed`: of a layer's ranks."""
        ranks = list(range(experts))
        random.Random(seed).shuffle(ranks)
        return [math.exp(-self.skew * rank / experts) for rank in ranks]

    def choose(
        self, draw: Callable[[], float], weights: list[float], count: int, before: Collection[int] = ()
    ) -> tuple[int, ...]:
        """`count` experts of a layer, in the order in which they are drawn. `draw`: gives numbers from 0 to 1.
        `before`: those of the token before."""

        def time(expert: int) -> float:
            """When the first of its random arrivals comes, at a rate that is its weight: in this order are they drawn
            by weight (Efraimidis and Spirakis, 2006)."""
            weight = weights[expert] * (self.repeat if expert in before else 1.0)
            return math.log(1.0 - draw()) / weight

        return tuple(nlargest(count, range(len(weights)), key=time))


UNIFORM = RouteModel()
ROUTE_MODELS = {
    "uniform": UNIFORM,
    "demo-moe": RouteModel(4.5, 1.0),
    "deep-moe": RouteModel(3.25, 1.0),
    "fine-moe": RouteModel(3.75, 1.5),
}
"""By name; all but the first are fitted to what these models choose for text (script `routes` of commit ce115f7)."""
LIKE_TEXT = "deep-moe"
"""The default if it matters how alike routes are."""


def name_of(model: RouteModel) -> str:
    """Of one in ROUTE_MODELS."""
    return next(name for name, one in ROUTE_MODELS.items() if one == model)


def find_route_model(name: str) -> RouteModel:
    """Raises ConfigError."""
    if name not in ROUTE_MODELS:
        near = nearest(name, ROUTE_MODELS) or f"; allowed: {', '.join(ROUTE_MODELS)}"
        raise ConfigError(f"there is no route model {name!r}{near}")
    return ROUTE_MODELS[name]
