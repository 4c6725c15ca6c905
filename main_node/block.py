"""A pass over a block of tokens: each row is a forward pass of one token, and the rows share each layer's experts.

Row by row, the model computes what it would compute without a block, to the last bit: where a product of several rows
sums in another order, none is made. The rows stop at each gate, in their order, until the experts of all of them have
answered; an expert that several rows chose is loaded once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from checkpoint.coroutine import Coroutine, suspend
from checkpoint.linear_batch import LinearCall, at_once, meeting, multiply
from checkpoint.row_caches import RowCaches

Experts = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, hidden [d, H], index [d, k], weights [d, k]) -> the experts' outputs [d, H]."""


class RowGate(NamedTuple):
    """What a row stops with: the gate of a layer has fired."""

    layer: int
    hidden: torch.Tensor
    """[1, H]"""
    chosen: torch.Tensor
    """Experts [1, k]."""
    weights: torch.Tensor
    """[1, k]"""


class _Dropped(BaseException):
    """Ends a row that is given up."""


def row_experts(layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The experts of one row [1, H], called by the model within a block."""
    output: torch.Tensor = suspend(RowGate(layer, hidden, index, weights))
    return output


class Block:
    """`forward(token, cache)`: one row's pass, which returns its logits. `tokens`: of the rows, the first of them at
    `position`. `experts`: computes a layer's. Rows share products of linear layers only where no bit changes."""

    def __init__(
        self,
        forward: Callable[[int, Any], torch.Tensor],
        tokens: Sequence[int],
        cache: Any,
        position: int,
        experts: Experts,
    ) -> None:
        self._caches = RowCaches(cache, position, len(tokens))
        self._forward = forward
        self._rows = [Coroutine(partial(self._run_row, row, token)) for row, token in enumerate(tokens)]
        self._stops: list[Any] = [None] * len(tokens)
        self._experts = experts

    def run(self) -> list[torch.Tensor]:
        """Every row's logits [V], in order. Run it in inference mode, once. Raises what a row or the experts raise."""
        try:
            stopped = self._go_on([None] * len(self._rows))
            while stopped:
                gates = [stop for stop in stopped if isinstance(stop, RowGate)]
                layer = gates[0].layer
                if len(gates) < len(self._rows) or any(gate.layer != layer for gate in gates):
                    raise RuntimeError(f"rows of a block stand at different places: {[type(one) for one in stopped]}")
                parts = zip(*((gate.hidden, gate.chosen, gate.weights) for gate in gates), strict=True)
                output = self._experts(layer, *(torch.cat(part) for part in parts))
                stopped = self._go_on([row.clone() for row in output.split(1)])
            return [row.result for row in self._rows]
        except BaseException:
            self._drop()
            raise

    @property
    def nbytes(self) -> int:
        """Of what is kept for `cut`, beside the cache."""
        return self._caches.nbytes

    def cut(self, rows: int) -> None:
        """After `run`: the cache is left as after the first `rows` rows."""
        self._caches.cut(rows)

    def _run_row(self, row: int, token: int) -> torch.Tensor:
        with at_once() if self._caches.in_turns else contextlib.nullcontext():
            return self._forward(token, self._caches.view(row))

    def _go_on(self, values: Sequence[torch.Tensor | None]) -> list[Any]:
        """Resume every row, until each has stopped at its next gate. Empty: all have ended."""
        stopped = [self._resume(row, value) for row, value in enumerate(values)]
        while any(isinstance(stop, LinearCall) for stop in stopped):
            waiting = [row for row, stop in enumerate(stopped) if isinstance(stop, LinearCall)]
            met = [waiting[index] for index in meeting(stopped[row] for row in waiting)]
            outputs = multiply([stopped[row] for row in met], exact=True)
            for row, output in zip(met, outputs, strict=True):
                stopped[row] = self._resume(row, output)
        return [] if all(row.ended for row in self._rows) else stopped

    def _resume(self, row: int, value: torch.Tensor | None) -> Any:
        if not isinstance(self._stops[row], LinearCall):
            self._caches.on_resumed(row)
        stop = self._stops[row] = self._rows[row].resume(value)
        if not isinstance(stop, LinearCall):
            self._caches.on_reached(row, stop.layer if isinstance(stop, RowGate) else None)
        return stop

    def _drop(self) -> None:
        """End the rows that stand somewhere: what they hold would outlive the request."""
        for row in self._rows:
            if not row.ended:
                try:
                    row.throw(_Dropped())
                except BaseException:  # noqa: BLE001 - where it stands it may raise another error in turn
                    continue
