"""The experts of one MoE layer, as the main model calls them: from a gate's choice to the layer's output."""

from __future__ import annotations

from functools import partial

import torch

from checkpoint.coroutine import in_coroutine
from main_node.engine.device_layer import DeviceLayerWork
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

    def compute(
        self,
        visit: t.Visit,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        is_block: bool = False,
        chunks: tuple[int, ...] = (),
    ) -> torch.Tensor:
        """One MoE layer, computed by the workers: hidden [T, H], index and weights [T, k] -> [T, H]. `is_block`: each
        row is a pass of its own. `chunks`: of a prompt that is read in several, the chunk of each row.

        While workers of other processes compute, the main model works for the predictor; those of this process compute
        on this thread afterwards. In lock-step, other requests' passes go on meanwhile. Raises RequestFailedError.
        """
        layer = self._layer(visit, hidden, index, weights)
        if is_block:
            layer.is_block, layer.chosen = True, tuple(map(tuple, layer.index.tolist()))
        layer.chunks = chunks
        if in_coroutine():  # then the step lends its thread
            self._run(visit, layer)
        else:
            with self._engine.lent.lend():
                self._run(visit, layer)
        return layer.combine()

    def _layer(self, visit: t.Visit, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> LayerWork:
        if hidden.is_cpu:
            layer = LayerWork(hidden, index, weights, self._engine.lent)
            if self.watch is not None:
                self.watch.keep_scores(visit, layer)
            return layer
        peers, device = self._engine.peers, hidden.device
        scores = self.watch.scores(visit.layer) if self.watch is not None else None
        leave = not all(peers.stays(number, device) for number in list(peers.workers))
        stays = partial(peers.stays, device=device)
        there = DeviceLayerWork(hidden, index, weights, self._engine.lent, stays, leave, scores)
        if self.watch is not None:
            self.watch.keep_scores(visit, there, there.gate_scores)
        return there

    def _run(self, visit: t.Visit, layer: LayerWork) -> None:
        """From the gate to the last answer."""
        engine, request = self._engine, visit.request
        announce = partial(engine.on_gate_fired, visit, layer)
        engine.pace.gate(request, announce)  # in emulated time, when it is due
        try:
            if self.watch is not None:
                if not engine.pace.profile_name:  # there it counts as computed with the gate
                    layer.yield_to_gates()
                for fact in self.watch.ahead(visit, layer):
                    engine.pace.on_foreseen(request, partial(engine.post, fact), self._attention)
            engine.wait(visit, layer)
            engine.pace.on_resumed(request)
            if engine.spans.on:
                engine.spans.on_resumed(visit)
        finally:
            engine.forget(visit)
