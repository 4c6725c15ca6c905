"""The routes of a simulated model and the predictions of its shadow: drawn at random, or from a recording."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from scheduler.drafts.length import MOST_DRAFTS
from scheduler.errors import ConfigError
from scheduler.policies.predictors.base import Scores
from scheduler.simulation.route_model import UNIFORM, RouteModel

if TYPE_CHECKING:
    from scheduler.simulation.scenario import Scenario

KEPT = 8 + 2 * MOST_DRAFTS
"""Decode passes that are kept. The shadow is at most that many ahead of the main model."""

SAME_TOKEN = 0.98
"""The share of an aligned shadow's own tokens that are the main model's. Measured at commit 244b3f6: int8 on
models/deep-moe, 471 of 480."""

Rows = tuple[tuple[int, int], ...]


class Gate(NamedTuple):
    """A gate's choice and scores, see `GateFired`, and what the main model foresees after it: (index of a pass, -1 for
    prefill; layer; scores), see `Foreseen`."""

    chosen: tuple[tuple[int, ...], ...]
    scores: Scores
    foreseen: tuple[tuple[int, int, Scores], ...] = ()


class Workload(Protocol):
    """One request. `layer`: the number of an MoE layer, from 0. `index`: the number of a decode pass; pass 0 reads the
    answer's first token. The same arguments always give the same result.

    `has_scores`: whether it has the gates' scores of all experts. `foresight`: the kind of its `Foreseen` events, as a
    predictor names it. `chunks`: tokens of each pass over the prompt, if that is fixed; empty: any will do.
    """

    @property
    def has_scores(self) -> bool: ...

    @property
    def foresight(self) -> str | None: ...

    @property
    def chunks(self) -> tuple[int, ...]: ...

    def prompt(self, layer: int, start: int, stop: int) -> Rows:
        """Prefill of tokens [start, stop) of the prompt: (expert, rows), ascending by expert, rows > 0."""

    def routes(self, index: int, layer: int) -> tuple[int, ...]:
        """The experts that the main model's gate chooses."""

    def predict(self, index: int, layer: int) -> tuple[int, ...] | None:
        """The experts that the shadow predicts, best first; None without a prediction."""

    def same_token(self, index: int) -> bool:
        """Whether the shadow's own token for a pass is the main model's, as long as it was aligned before. If so,
        a draft of it is right."""

    def ahead(self, index: int, layer: int, same: bool) -> tuple[int, ...] | None:
        """As `predict`, in a pass that runs ahead of a due alignment. `same`: it reads the main model's token."""

    def misled_routes(self, index: int, layer: int) -> tuple[int, ...]:
        """As `routes`, in a row that reads the shadow's own token if it is another: what `ahead` predicts."""

    def gate(self, index: int, layer: int) -> Gate:
        """The gate of a pass; -1, -2, ...: the passes over the prompt. Raises ConfigError if the workload is not
        `has_scores`."""


class RandomWorkload:
    """Random routes, by a route model. The shadow predicts each activated expert with probability `recall`, and
    otherwise one that is not activated. `same_token`: the probability that its own token is the main model's. From
    another token it predicts experts that this one might choose. There are no scores. `popular`: the seed of what is
    popular, which requests share. `size`: layers, experts of a layer, experts that a token chooses. Raises ConfigError.
    """

    has_scores = False
    foresight: str | None = None
    chunks: tuple[int, ...] = ()

    def __init__(
        self,
        size: tuple[int, int, int],
        recall: float | None,
        seed: int | str,
        same_token: float = SAME_TOKEN,
        model: RouteModel = UNIFORM,
        popular: int | str = 0,
    ) -> None:
        layers, experts, top_k = size
        for name, value in (("--recall", recall), ("--acceptance", same_token)):
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"{name} is {value:g}; allowed: a number from 0 to 1")
        if not 1 <= top_k <= experts:
            raise ConfigError(f"--top-k is {top_k} with {experts} experts; allowed: 1 to {experts}")
        self._shape = size
        self._recall = recall
        self._seed = seed
        self._same_token = same_token
        self._model = model
        weighted = 0 if model.memoryless else layers
        self._weights = [model.weights(experts, f"{popular} popular {layer}") for layer in range(weighted)]
        self._routes: dict[int, list[tuple[int, ...]]] = {}
        self._predictions: dict[int, list[tuple[int, ...]]] = {}

    def prompt(self, layer: int, start: int, stop: int) -> Rows:
        draw = random.Random(f"{self._seed} prompt {layer}").random
        rows = [0] * self._shape[1]
        chosen: tuple[int, ...] = ()
        for token in range(stop):
            chosen = self._choose(draw, layer, chosen)
            for expert in chosen:
                rows[expert] += token >= start
        return tuple((expert, count) for expert, count in enumerate(rows) if count)

    def routes(self, index: int, layer: int) -> tuple[int, ...]:
        if index not in self._routes:
            # Each token's follow from those of the token before, if not from nothing.
            first = index if self._model.memoryless else max((at for at in self._routes if at < index), default=-1) + 1
            for at in range(first, index + 1):
                self._routes[at] = self._next_routes(at)
                self._routes.pop(at - KEPT, None)
        return self._routes[index][layer]

    def _next_routes(self, index: int) -> list[tuple[int, ...]]:
        """Of all layers, for a token whose predecessor's are known."""
        layers, experts, top_k = self._shape
        draw = random.Random(f"{self._seed} routes {index}").random
        if self._model.memoryless:
            return _routes(draw, layers, experts, top_k)
        before = self._routes[index - 1] if index else [()] * layers
        return [self._choose(draw, layer, before[layer]) for layer in range(layers)]

    def _choose(self, draw: Callable[[], float], layer: int, before: tuple[int, ...]) -> tuple[int, ...]:
        _, experts, top_k = self._shape
        if self._model.memoryless:
            return _distinct(draw, experts, top_k, ())
        return self._model.choose(draw, self._weights[layer], top_k, before)

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

    def same_token(self, index: int) -> bool:
        return random.Random(f"{self._seed} token {index}").random() < self._same_token

    def ahead(self, index: int, layer: int, same: bool) -> tuple[int, ...] | None:
        if same or self._recall is None:
            return self.predict(index, layer)
        return self._other(index, layer)

    def misled_routes(self, index: int, layer: int) -> tuple[int, ...]:
        recall = 1.0 if self._recall is None else self._recall
        draw = random.Random(f"{self._seed} misled {index} {layer}").random
        return mistaken(draw, self._other(index, layer), self._shape[1], recall)

    def _other(self, index: int, layer: int) -> tuple[int, ...]:
        draw = random.Random(f"{self._seed} other token {index} {layer}").random
        before = () if self._model.memoryless or not index else self.routes(index - 1, layer)
        return self._choose(draw, layer, before)

    def gate(self, index: int, layer: int) -> Gate:
        raise ConfigError("random routes have no scores; simulate the routes of a recording (--routes)")


def mistaken(draw: Callable[[], float], true: tuple[int, ...], experts: int, recall: float) -> tuple[int, ...]:
    """`true`, with each expert kept with probability `recall` and otherwise replaced by one that is not in `true`."""
    kept = [draw() < recall for _ in true]
    if all(kept):
        return true
    wrong = iter(_distinct(draw, experts, min(kept.count(False), experts - len(true)), true))
    drawn = [expert if right else next(wrong, None) for expert, right in zip(true, kept, strict=True)]
    return tuple([expert for expert in drawn if expert is not None])


def _routes(draw: Callable[[], float], layers: int, experts: int, top_k: int) -> list[tuple[int, ...]]:
    """`top_k` different experts for every layer."""
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


def random_workload(
    scenario: Scenario,
    recall: float | None = None,
    seed: int | str = 0,
    same_token: float = SAME_TOKEN,
    popular: int | str = 0,
) -> RandomWorkload:
    """For the scenario's model. `recall` None: no predictions. Raises ConfigError."""
    p = scenario.profile
    return RandomWorkload((p.layers, p.experts, p.top_k), recall, seed, same_token, scenario.route_model, popular)
