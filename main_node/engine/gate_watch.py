"""What the scheduler learns of a gate beside its choice: its scores, and those expected of later gates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from checkpoint.gates import GateOutput, Gates
from checkpoint.linear_batch import at_once
from checkpoint.prediction.run_ahead import Captured
from main_node.engine.foresight import AttentionForesight, TokenForesight, make_foresight
from main_node.engine.layer import LayerWork
from main_node.engine.prediction_trial import PredictionTrial
from scheduler import types as t
from scheduler.policies.strategy import Strategy

PARTIAL_S = 1.0
"""Most seconds that a prediction waits for the resident experts' outputs."""


@dataclass(slots=True)
class PassMemory:
    """What is kept of one pass. Passes that take turns layer by layer have one each."""

    final: bool
    """Its last row is the request's last: not so for a chunk of a prompt that is not the last chunk."""
    outputs: GateOutput = field(default_factory=dict)
    captured: Captured = field(default_factory=Captured)
    last_rows: dict[int, tuple[int, torch.Tensor]] = field(default_factory=dict)
    """Of its request, see `Request.last_rows`."""


class GateWatch:
    """Made only for a strategy that reads any of it. `cache`: returns the KV cache of the request whose pass is under
    way. `token_file`: weights of the token-wise predictor, which learns with every decoded token
    where its `learning_rate` is more than 0. `trial`: says whether decode passes predict; always if not given. Raises
    UnsupportedFamilyError for a family whose gates give no scores."""

    def __init__(
        self,
        model: Any,
        strategy: Strategy,
        shape: t.ModelShape,
        cache: Callable[[], Any],
        token_file: Path | None,
        learning_rate: float = 0.0,
        trial: PredictionTrial | None = None,
    ) -> None:
        self._trial = trial or PredictionTrial(weighs=False)
        self._gates = Gates(model)
        self._scores = strategy.wants_scores
        kind = strategy.predictor.foresight
        self._foresight = make_foresight(kind, model, self._gates, shape, cache, token_file, learning_rate)
        self._memory = PassMemory(final=True)

    def use(self, memory: PassMemory) -> None:
        """The pass with this memory goes on."""
        self._memory = memory
        self._gates.use(memory.outputs)
        if isinstance(self._foresight, AttentionForesight):
            self._foresight.use(memory.captured)
        elif isinstance(self._foresight, TokenForesight):
            self._foresight.use(memory.last_rows)

    def scores(self, layer: int) -> torch.Tensor | None:
        """[T, E] of the gate that has fired; None where no policy reads them."""
        return self._gates.scores(layer) if self._scores else None

    def keep_scores(self, visit: t.Visit, layer: LayerWork, scores: torch.Tensor | None = None) -> None:
        """A gate has fired: keep its score of every expert, where a policy reads them. `scores`: on the CPU, as the
        layer's index and weights are; the gate's own if not given."""
        if not self._scores:
            return
        scores = self._gates.scores(visit.layer) if scores is None else scores
        index, weights = layer.index, layer.weights
        layer.scores = _floats(scores)
        layer.chosen = tuple(tuple(row) for row in index.tolist())
        gates, number = self._gates, visit.layer

        def reweigh(experts: tuple[tuple[int, ...], ...]) -> tuple[torch.Tensor, torch.Tensor]:
            new_index, new = gates.reweigh(number, index, weights, experts, scores)
            lacking = [(row, len(some)) for row, some in enumerate(experts) if len(some) < new_index.shape[1]]
            for row, count in lacking:  # an expert that is named twice would compute the row twice
                new_index[row, count:] = -1
            return new_index, new

        layer.reweigh = reweigh

    def ahead(self, visit: t.Visit, layer: LayerWork) -> Iterable[t.Foreseen]:
        """The expected scores of later gates, computed while the workers compute this layer. Where the trial weighs
        them, the output of a layer whose experts are all there is not run ahead: its true gate comes as soon."""
        try:
            if self._foresight is None or (isinstance(self._foresight, TokenForesight) and not self._memory.final):
                return ()
            if len(layer.hidden) == 1 and not self._trial.predicts:
                return ()
            with at_once():
                if_all = not self._trial.weighs
                return self._foresight.ahead(visit, layer.hidden, lambda: layer.partial(PARTIAL_S, if_all))
        finally:
            self._gates.forget(visit.layer)

    @property
    def nbytes(self) -> int:
        """Memory beyond the model's: a predictor's weights."""
        return self._foresight.nbytes if self._foresight is not None else 0


def needs_watch(strategy: Strategy) -> bool:
    """Whether a strategy reads any of it."""
    return strategy.wants_scores or strategy.predictor.foresight is not None


def _floats(scores: torch.Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in scores.tolist())
