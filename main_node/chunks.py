"""A pass over several chunks of a prompt: each is a forward pass of its own, and they share each layer's experts.

Chunk by chunk, the model computes what it would compute if it read them one after the other, to the last bit. The
chunks stop at each gate, in their order, until the experts of all of them have answered: an expert that several chose
is loaded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from checkpoint.coroutine import Coroutine
from checkpoint.linear_batch import at_once
from checkpoint.row_caches import seen_at
from main_node.block import RowGate


class Experts(Protocol):
    """Computes a layer's."""

    def __call__(self, layer: int, *rows: torch.Tensor, chunks: tuple[int, ...]) -> torch.Tensor:
        """`rows`: hidden [T, H], index [T, k], weights [T, k]; `chunks`: of each row -> the outputs [T, H]."""


class _Dropped(BaseException):
    """Ends a chunk that is given up."""


class Chunks:
    """`forward(tokens, cache, last)`: a chunk's pass, which returns the logits of the token after it, [1 or 0, V], if
    it is the `last` one. `tokens`: of all chunks, the first of them at `position`, in chunks of `size`. `cache`: with
    rows only, which each chunk appends to. `last`: the tokens end a prompt."""

    def __init__(
        self,
        forward: Callable[[list[int], Any, bool], torch.Tensor],
        tokens: list[int],
        cache: Any,
        position: int,
        size: int,
        experts: Experts,
        last: bool,
    ) -> None:
        self._forward, self._experts = forward, experts
        parts = [(tokens[at : at + size], seen_at(cache, position + at)) for at in range(0, len(tokens), size)]
        ends = [False] * (len(parts) - 1) + [last]
        self._chunks = [
            Coroutine(partial(self._run_chunk, some, view, end)) for (some, view), end in zip(parts, ends, strict=True)
        ]
        self._counts = [len(some) for some, _ in parts]
        self._numbers = tuple(number for number, count in enumerate(self._counts) for _ in range(count))

    def run(self) -> torch.Tensor:
        """What the pass of the last chunk returns. Run it in inference mode, once. Raises what a chunk or the experts
        raise."""
        try:
            gates = self._go_on([None] * len(self._chunks))
            while gates:
                layer = gates[0].layer
                parts = zip(*((gate.hidden, gate.chosen, gate.weights) for gate in gates), strict=True)
                output = self._experts(layer, *(torch.cat(part) for part in parts), chunks=self._numbers)
                gates = self._go_on([some.clone() for some in output.split(self._counts)])
            return self._chunks[-1].result
        except BaseException:
            self._drop()
            raise

    def _run_chunk(self, tokens: list[int], cache: Any, last: bool) -> torch.Tensor:
        with at_once():
            return self._forward(tokens, cache, last)

    def _go_on(self, values: Sequence[torch.Tensor | None]) -> list[RowGate]:
        """Resume every chunk until it stops at its next gate. Empty: all have ended."""
        stopped = [chunk.resume(value) for chunk, value in zip(self._chunks, values, strict=True)]
        if all(chunk.ended for chunk in self._chunks):
            return []
        if len({stop.layer for stop in stopped if isinstance(stop, RowGate)}) != 1 or None in stopped:
            raise RuntimeError(f"chunks of a prompt stand at different places: {[type(one) for one in stopped]}")
        return stopped

    def _drop(self) -> None:
        """End the chunks that stand somewhere: what they hold would outlive the request."""
        for chunk in self._chunks:
            if not chunk.ended:
                try:
                    chunk.throw(_Dropped())
                except BaseException:  # noqa: BLE001 - where it stands it may raise another error in turn
                    continue
