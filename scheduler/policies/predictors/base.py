"""Who else than the shadow says which experts a pass will need: told what happens, they say what they expect."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from random import Random
from typing import Literal, NamedTuple, Protocol

from scheduler.types import ModelShape, Visit

Foresight = Literal["gate", "gates", "attention", "token"]
"""What the main model computes for a predictor, as `Foreseen` events, once a layer's gate has fired: `gate`, the next
MoE layer's gate on this layer's gate input (Fate's cross-layer gate); `gates`, those of several next layers on it
(HOBBIT); `attention`, the next layer's attention and gate on what this layer's resident and shared experts give
(importance); `token`, a small network of this layer on its gate input, about the next token (SMOE)."""

Scores = tuple[tuple[float, ...], ...]
"""For each row, one score an expert."""


class Forecast(NamedTuple):
    """`experts`: what is predicted, best first; recall counts these. `bring`: those that are to be in slots by then, in
    the order in which they are to be loaded; None: all of `experts`."""

    visit: Visit
    experts: tuple[int, ...]
    bring: tuple[int, ...] | None = None


class Predictor(Protocol):
    """One object serves one core. The same facts get the same forecasts. A forecast for a visit whose gate has fired
    comes to nothing. `foresight`: what the main model must compute for it."""

    @property
    def foresight(self) -> Foresight | None: ...

    def begun(self, visit: Visit, rows: int, prefill: bool) -> Iterable[Forecast]:
        """A pass of so many rows begins; `visit` is that of its first MoE layer."""

    def fired(self, visit: Visit, named: Mapping[int, int], scores: Scores, prefill: bool) -> Iterable[Forecast]:
        """A gate has fired. `named`: expert -> rows, as it chose. `scores`: empty where the core does not get them."""

    def foreseen(self, visit: Visit, scores: Scores, resident: Collection[int], prefill: bool) -> Iterable[Forecast]:
        """What the main model has computed for it. `resident`: experts of that layer in a slot or on their way."""

    def paced(self, load_s: float, layer_s: float) -> None:
        """As measured so far: one expert's load, and what a layer of a decode pass takes without its stalls."""

    def closed(self, request: int) -> None:
        """A request is over; what is still known of it need not be kept."""


class Silent:
    """Says nothing: predictions come from the shadow, as `Predicted` events, or from nobody. A base for others."""

    foresight: Foresight | None = None

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape

    def begun(self, visit: Visit, rows: int, prefill: bool) -> Iterable[Forecast]:
        return ()

    def fired(self, visit: Visit, named: Mapping[int, int], scores: Scores, prefill: bool) -> Iterable[Forecast]:
        return ()

    def foreseen(self, visit: Visit, scores: Scores, resident: Collection[int], prefill: bool) -> Iterable[Forecast]:
        return ()

    def paced(self, load_s: float, layer_s: float) -> None:
        pass

    def closed(self, request: int) -> None:
        pass


class RandomPredictor(Silent):
    """Any k experts, each as likely: "workers prefetch experts randomly" (OD-MoE Fig. 8, case 5). Recall is k / E."""

    def __init__(self, shape: ModelShape, seed: int = 0) -> None:
        super().__init__(shape)
        self.seed = seed

    def begun(self, visit: Visit, rows: int, prefill: bool) -> Iterable[Forecast]:
        if prefill:
            return ()
        shape = self.shape
        return [
            self._guess(visit._replace(layer=layer), shape.count(ordinal)) for ordinal, layer in enumerate(shape.layers)
        ]

    def _guess(self, visit: Visit, experts: int) -> Forecast:
        number = ((self.seed * 1_000_003 + visit.request) * 1_000_003 + visit.position) * 1_000_003 + visit.layer
        return Forecast(visit, tuple(Random(number).sample(range(experts), min(self.shape.top_k, experts))))
