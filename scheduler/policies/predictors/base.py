"""Predictors: which experts a pass will need, if the shadow does not predict them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from random import Random
from typing import Literal, NamedTuple, Protocol

from scheduler.types import ModelShape, Visit

Foresight = Literal["gate", "gates", "attention", "token"]
"""What the main model computes for a predictor once a layer's gate has fired. It arrives as `Foreseen` events.

- `gate`: the next MoE layer's gate on this layer's gate input (Fate's cross-layer gate).
- `gates`: the gates of several next layers on this layer's gate input (HOBBIT).
- `attention`: the next layer's attention and gate on the output of this layer's resident and shared experts
  (importance).
- `token`: a small network of this layer on its gate input, for the next token (SMOE).
"""

Scores = tuple[tuple[float, ...], ...]
"""One tuple a row, one score an expert."""


class Forecast(NamedTuple):
    """The experts that a predictor expects for one visit."""

    visit: Visit
    experts: tuple[int, ...]
    """All that are predicted, best first. Recall counts these."""
    bring: tuple[int, ...] | None = None
    """Those that are to be in slots by then, in the order of their loads. None: all of `experts`."""


class Predictor(Protocol):
    """One object serves one core. The same events lead to the same forecasts.

    A forecast for a visit whose gate has fired is ignored. `prefill`: the pass is the prompt's.
    """

    @property
    def foresight(self) -> Foresight | None:
        """What the main model must compute for this predictor."""

    def on_pass_begun(self, visit: Visit, tokens: int, prefill: bool) -> Iterable[Forecast]:
        """A pass of `tokens` tokens begins. `visit`: its first MoE layer."""

    def on_gate_fired(self, visit: Visit, rows: Mapping[int, int], scores: Scores, prefill: bool) -> Iterable[Forecast]:
        """A gate has fired. `rows`: chosen expert -> its rows. `scores`: empty if the core does not get them."""

    def on_foreseen(self, visit: Visit, scores: Scores, resident: Collection[int], prefill: bool) -> Iterable[Forecast]:
        """The main model's foresight for `visit`. `resident`: experts of that layer in a slot or in flight."""

    def on_paced(self, load_s: float, layer_s: float) -> None:
        """Measured so far, in seconds: the load of one expert, and a layer of a decode pass without its stalls."""

    def on_request_closed(self, request: int) -> None:
        """The request is over; drop its data."""


class PredictorBase:
    """Neutral defaults, which forecast nothing. The base class of the others."""

    foresight: Foresight | None = None

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape

    def on_pass_begun(self, visit: Visit, tokens: int, prefill: bool) -> Iterable[Forecast]:
        return ()

    def on_gate_fired(self, visit: Visit, rows: Mapping[int, int], scores: Scores, prefill: bool) -> Iterable[Forecast]:
        return ()

    def on_foreseen(self, visit: Visit, scores: Scores, resident: Collection[int], prefill: bool) -> Iterable[Forecast]:
        return ()

    def on_paced(self, load_s: float, layer_s: float) -> None:
        pass

    def on_request_closed(self, request: int) -> None:
        pass


class NoPrediction(PredictorBase):
    """No forecasts: the shadow predicts, as `Predicted` events, or nothing does."""


class RandomPredictor(PredictorBase):
    """Any k experts, equally likely: "workers prefetch experts randomly" (OD-MoE Fig. 8, case 5). Recall is k / E."""

    def __init__(self, shape: ModelShape, seed: int = 0) -> None:
        super().__init__(shape)
        self.seed = seed

    def on_pass_begun(self, visit: Visit, tokens: int, prefill: bool) -> Iterable[Forecast]:
        if prefill:
            return ()
        shape = self.shape
        return [
            self._guess(visit._replace(layer=layer), shape.count(ordinal)) for ordinal, layer in enumerate(shape.layers)
        ]

    def _guess(self, visit: Visit, experts: int) -> Forecast:
        number = ((self.seed * 1_000_003 + visit.request) * 1_000_003 + visit.position) * 1_000_003 + visit.layer
        return Forecast(visit, tuple(Random(number).sample(range(experts), min(self.shape.top_k, experts))))
