"""What the main model computes for predictors while the workers compute a layer's experts: the scores that later gates
are expected to give. The model's own results do not depend on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from checkpoint.gates import Gates
from checkpoint.prediction.run_ahead import RunAhead
from checkpoint.prediction.token_predictor import TokenPredictor, load, targets
from scheduler import types as t
from scheduler.errors import ConfigError
from scheduler.policies.predictors.base import Foresight as Kind

SEVERAL = 3
"""How many layers `gates` looks ahead (HOBBIT stacks the gates of the next few; HybriMoE prefetches for three)."""
Partial = Callable[[], torch.Tensor | None]


class Foresight(Protocol):
    """Called by the main thread within a layer's experts, once its gate has fired."""

    @property
    def nbytes(self) -> int:
        """Memory beyond the model's."""

    def ahead(self, visit: t.Visit, hidden: torch.Tensor, partial: Partial) -> list[t.Foreseen]:
        """`hidden` [T, H]: this layer's gate input. `partial`: called at most once; the weighted sum of the resident
        experts' outputs [T, H], or None where they do not come in time."""


class GateForesight:
    """The gates of the next `depth` MoE layers on this layer's gate input: for every row, in prefill too."""

    nbytes = 0

    def __init__(self, gates: Gates, depth: int = 1) -> None:
        self._gates = gates
        layers = gates.layers
        self._next = {layer: layers[n + 1 : n + 1 + depth] for n, layer in enumerate(layers)}

    def ahead(self, visit: t.Visit, hidden: torch.Tensor, partial: Partial) -> list[t.Foreseen]:
        return [
            t.Foreseen(visit.request, visit.position, layer, _rows(self._gates.ranked_at(layer, hidden)))
            for layer in self._next[visit.layer]
        ]


class AttentionForesight:
    """The next layer's attention and gate on the output of the resident and shared experts (importance, section 5.2).

    In decode passes only. It predicts nothing for the first MoE layer with a kind of attention that no earlier layer
    has.
    """

    nbytes = 0

    def __init__(self, model: Any, gates: Gates, cache: Callable[[], Any]) -> None:
        self._replay = RunAhead(model, gates, cache)
        self.use = self._replay.use

    def ahead(self, visit: t.Visit, hidden: torch.Tensor, partial: Partial) -> list[t.Foreseen]:
        until = self._replay.next_layer(visit.layer)
        if until is None:
            self._replay.forget()
        if until is None or len(hidden) != 1 or (given := partial()) is None:
            return []
        scores = self._replay.scores(visit.layer, given)
        return [] if scores is None else [t.Foreseen(visit.request, visit.position, until, _rows(scores))]


class TokenForesight:
    """The next token's experts of this layer, from this token's gate input, by a small network of the gate's shape
    (SMOE, section IV-D). After a prefill, from its last row.

    `learning_rate`: with more than 0 the network takes a step with every decoded token, as its gate fires (the paper's
    online training; assumed: one step of normalised gradient descent a token and layer, nothing kept between runs).
    """

    def __init__(
        self, predictor: TokenPredictor, gates: Gates, shape: t.ModelShape, learning_rate: float = 0.0
    ) -> None:
        self.predictor = predictor
        self._gates, self._top_k, self._rate = gates, shape.top_k, learning_rate
        self._before: dict[int, tuple[int, torch.Tensor]] = {}
        """See `Request.last_rows`."""

    @property
    def nbytes(self) -> int:
        return self.predictor.nbytes

    def use(self, last_rows: dict[int, tuple[int, torch.Tensor]]) -> None:
        """A pass of the request with these goes on."""
        self._before = last_rows

    def ahead(self, visit: t.Visit, hidden: torch.Tensor, partial: Partial) -> list[t.Foreseen]:
        row, then = hidden[-1:], visit.position + len(hidden)
        if self._rate:
            if len(hidden) == 1:
                self._learn(visit)
            self._before[visit.layer] = (then, row.clone())
        return [t.Foreseen(visit.request, then, visit.layer, _rows(self.predictor.scores(visit.layer, row)))]

    def _learn(self, visit: t.Visit) -> None:
        position, row = self._before.get(visit.layer, (-1, None))
        if row is not None and position == visit.position:
            wanted = targets(self._gates.ranked_scores(visit.layer), self._top_k)
            self.predictor.learn(visit.layer, row, wanted, self._rate)


def make_foresight(
    kind: Kind | None,
    model: Any,
    gates: Gates,
    shape: t.ModelShape,
    cache: Callable[[], Any],
    token_file: Path | None,
    learning_rate: float = 0.0,
) -> Foresight | None:
    """`cache`: returns the KV cache of the request whose pass is under way. `token_file`: weights of the token-wise
    predictor.

    Raises UnsupportedFamilyError for a model whose layers cannot be run ahead, ConfigError, and CheckpointError for a
    `token_file` that cannot be read.
    """
    if kind is None:
        return None
    if kind == "gate":
        return GateForesight(gates)
    if kind == "gates":
        return GateForesight(gates, SEVERAL)
    if kind == "attention":
        return AttentionForesight(model, gates, cache)
    if token_file is None:
        raise ConfigError(
            "a token-wise predictor needs trained weights; make them with odmoe train-predictor, or name their file"
        )
    return TokenForesight(load(token_file, gates, model.device), gates, shape, learning_rate)


def _rows(scores: torch.Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, scores.tolist()))
