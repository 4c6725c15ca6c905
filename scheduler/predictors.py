"""Who else than the shadow says which experts a decode pass will need: pure functions of a visit."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Protocol

from scheduler.errors import ConfigError
from scheduler.types import Visit


class Predictor(Protocol):
    """Asked by the core when a decode pass begins, once for each MoE layer. The same visit gets the same answer."""

    def predict(self, visit: Visit, experts: int, top_k: int) -> tuple[int, ...]:
        """At most `top_k` different experts out of 0 ... `experts` - 1, best first."""


class RandomPredictor:
    """Any k experts, each as likely: "workers prefetch experts randomly" (OD-MoE Fig. 8, case 5). Recall is k / E."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def predict(self, visit: Visit, experts: int, top_k: int) -> tuple[int, ...]:
        number = ((self.seed * 1_000_003 + visit.request) * 1_000_003 + visit.position) * 1_000_003 + visit.layer
        return tuple(Random(number).sample(range(experts), min(top_k, experts)))


_PREDICTORS: dict[str, Callable[[], Predictor | None]] = {
    "sep": lambda: None,  # predictions come from the shadow, as events
    "random": RandomPredictor,
    "none": lambda: None,
}


def make_predictor(name: str) -> Predictor | None:
    """What --predictor names; None where the core has nothing to ask. Raises ConfigError."""
    if name not in _PREDICTORS:
        raise ConfigError(f"--predictor is {name!r}; allowed: {', '.join(_PREDICTORS)}")
    return _PREDICTORS[name]()
