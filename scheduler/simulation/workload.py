"""What a simulated model routes, and what its shadow says: drawn by chance, or as a real run recorded it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from scheduler.errors import ConfigError
from scheduler.policies.predictors.base import Scores

if TYPE_CHECKING:
    from scheduler.simulation.scenario import Scenario

KEPT = 8
"""Decode passes that are remembered: the shadow is ahead of the main model by two at most."""

Rows = tuple[tuple[int, int], ...]


class Gate(NamedTuple):
    """What else a gate says than which experts compute how many rows, see `GateFired`; and what the main model foresees
    once it has fired: (index of a pass, -1 for prefill; layer; scores), see `Foreseen`."""

    chosen: tuple[tuple[int, ...], ...]
    scores: Scores
    foreseen: tuple[tuple[int, int, Scores], ...] = ()


class Workload(Protocol):
    """One request. `layer`: the number of an MoE layer, from 0; `index`: of a decode pass, 0 being the one that reads
    the answer's first token. The same question has the same answer, however often it is asked.

    `scored`: it knows what gates think of all experts. `foresight`: what it knows of `Foreseen`, as a predictor names
    it.
    """

    @property
    def scored(self) -> bool: ...

    @property
    def foresight(self) -> str | None: ...

    def prompt(self, layer: int) -> Rows:
        """Prefill: (expert, rows), ascending by expert, rows > 0."""

    def routes(self, index: int, layer: int) -> tuple[int, ...]:
        """The experts that the main model's gate names."""

    def predict(self, index: int, layer: int) -> tuple[int, ...] | None:
        """The experts that the shadow names, best first; None where it said nothing."""

    def gate(self, index: int, layer: int) -> Gate:
        """Of a pass, -1 for prefill. Raises ConfigError where it is not `scored`."""


class RandomWorkload:
    """Uniform routes. The shadow names each activated expert with probability `recall`, else one that is not activated.

    Nobody can say what the gates of no model think: it has no scores. Raises ConfigError.
    """

    scored = False
    foresight: str | None = None

    def __init__(
        self, layers: int, experts: int, top_k: int, prompt_tokens: int, recall: float | None, seed: int
    ) -> None:
        if recall is not None and not 0 <= recall <= 1:
            raise ConfigError(f"--recall is {recall:g}; allowed: a number from 0 to 1")
        if not 1 <= top_k <= experts:
            raise ConfigError(f"--top-k is {top_k} with {experts} experts; allowed: 1 to {experts}")
        self._shape = layers, experts, top_k
        self._prompt_tokens = prompt_tokens
        self._recall = recall
        self._seed = seed
        self._routes: dict[int, list[tuple[int, ...]]] = {}
        self._predictions: dict[int, list[tuple[int, ...]]] = {}

    def prompt(self, layer: int) -> Rows:
        _, experts, top_k = self._shape
        draw = random.Random(f"{self._seed} prompt {layer}").random
        rows = [0] * experts
        for _ in range(self._prompt_tokens):
            for expert in _distinct(draw, experts, top_k, ()):
                rows[expert] += 1
        return tuple((expert, count) for expert, count in enumerate(rows) if count)

    def routes(self, index: int, layer: int) -> tuple[int, ...]:
        if index not in self._routes:
            layers, experts, top_k = self._shape
            draw = random.Random(f"{self._seed} routes {index}").random
            self._routes[index] = _routes(draw, layers, experts, top_k)
            self._routes.pop(index - KEPT, None)
        return self._routes[index][layer]

    def predict(self, index: int, layer: int) -> tuple[int, ...] | None:
        if self._recall is None:
            return None
        if index not in self._predictions:
            draw = random.Random(f"{self._seed} predictions {index}").random
            layers, experts, _ = self._shape
            routes = [self.routes(index, at) for at in range(layers)]
            self._predictions[index] = [mistaken(draw, true, experts, self._recall) for true in routes]
            self._predictions.pop(index - KEPT, None)
        return self._predictions[index][layer]

    def gate(self, index: int, layer: int) -> Gate:
        raise ConfigError("routes drawn by chance have no scores; simulate the routes of a recording (--routes)")


def mistaken(draw: Callable[[], float], true: tuple[int, ...], experts: int, recall: float) -> tuple[int, ...]:
    """`true` with each expert kept with probability `recall`, and exchanged for one of the others else."""
    kept = [draw() < recall for _ in true]
    if all(kept):
        return true
    wrong = iter(_distinct(draw, experts, min(kept.count(False), experts - len(true)), true))
    named = [expert if right else next(wrong, None) for expert, right in zip(true, kept, strict=True)]
    return tuple([expert for expert in named if expert is not None])


def _routes(draw: Callable[[], float], layers: int, experts: int, top_k: int) -> list[tuple[int, ...]]:
    """Of every layer, `top_k` different experts."""
    routes = []
    for _ in range(layers):
        chosen: list[int] = []
        while len(chosen) < top_k:
            expert = int(draw() * experts)
            if expert not in chosen:
                chosen.append(expert)
        routes.append(tuple(chosen))
    return routes


def _distinct(draw: Callable[[], float], experts: int, count: int, but: tuple[int, ...]) -> tuple[int, ...]:
    """`count` experts, all different, none of them in `but`."""
    chosen: list[int] = []
    while len(chosen) < count:
        expert = int(draw() * experts)
        if expert not in chosen and expert not in but:
            chosen.append(expert)
    return tuple(chosen)


def random_workload(scenario: Scenario, recall: float | None = None, seed: int = 0) -> RandomWorkload:
    """For the scenario's model and prompt. `recall` None: no shadow, or one that says nothing. Raises ConfigError."""
    p = scenario.profile
    return RandomWorkload(p.layers, p.experts, p.top_k, scenario.prompt_tokens, recall, seed)
