"""The experts of one MoE layer, as the main model calls them: from a gate's choice to the layer's output."""

from __future__ import annotations

from functools import partial

import torch

from main_node.engine.engine import Engine
from main_node.engine.gate_watch import GateWatch
from main_node.engine.layer import LayerWork
from scheduler import types as t


class RemoteExperts:
    """Stands in for the model's expert modules. `watch`: scores and foresight, where the scheduler's policies read
    them."""

    def __init__(self, engine: Engine, watch: GateWatch | None = None) -> None:
        self.watch = watch
        self._engine = engine
        self._attention = engine.core.strategy.predictor.foresight == "attention"

    def compute(self, visit: t.Visit, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """One MoE layer, computed by the workers: hidden [T, H], index and weights [T, k] -> [T, H].

        While workers of other processes compute, the main model works for the predictor; those of this process compute
        on this thread afterwards. Raises RequestFailedError.
        """
        engine, layer = self._engine, LayerWork(hidden, index, weights, self._engine.lent)
        if self.watch is not None:
            self.watch.look(visit, layer)
        with engine.lent.lent():
            engine.pace.gate(partial(engine.gate_fired, visit, layer))  # emulated time announces it when it is due
            try:
                for fact in self.watch.ahead(visit, layer) if self.watch is not None else ():
                    engine.pace.foreseen(partial(engine.post, fact), self._attention)
                engine.wait(visit, layer)
                engine.pace.resumed()
                engine.spans.resumed(visit.layer)
            finally:
                engine.forget(visit)
        return layer.combine()
