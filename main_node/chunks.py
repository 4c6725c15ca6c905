"""A pass over several blocks of a prompt, in chunks that are forward passes and share each layer's experts.

Block by block, the model computes what it would compute if it read them one after the other, to the last bit. The
chunks stop at each gate, in their order, until the experts of all of them have answered: an expert that several chose
is loaded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from checkpoint.coroutine import Coroutine
from checkpoint.joint_blocks import in_blocks
from checkpoint.joint_rows import LEAST_ROWS
from checkpoint.linear_batch import at_once
from checkpoint.row_caches import seen_at
from main_node.block import RowGate


class Experts(Protocol):
    """Computes a layer's."""

    def __call__(self, layer: int, *rows: torch.Tensor, chunks: tuple[int, ...]) -> torch.Tensor:
        """`rows`: hidden [T, H], index [T, k], weights [T, k]; `chunks`: the block of each -> the outputs [T, H]."""


class Sizes(NamedTuple):
    """`block`: tokens of a block, whose rows have the bits of a pass over it alone. `chunk`: most tokens of a forward
    pass, in whole blocks; see `checkpoint.joint_blocks`."""

    block: int
    chunk: int

    def starts(self, count: int) -> list[int]:
        """Of the forward passes over so many tokens. A last block with too few rows has one of its own."""
        rest = count % self.block
        own = {count - rest} if 0 < rest < LEAST_ROWS else set()
        return sorted({*range(0, count, self.chunk), *own})


class _Dropped(BaseException):
    """Ends a chunk that is given up."""


class Chunks:
    """`forward(tokens, cache, last)`: a chunk's pass, which returns the logits of the token after it, [1 or 0, V], if
    it is the `last` one. `tokens`: of all chunks, the first of them at `position`. `cache`: with rows only, which each
    chunk appends to. `last`: the tokens end a prompt."""

    def __init__(
        self,
        forward: Callable[[list[int], Any, bool], torch.Tensor],
        tokens: list[int],
        cache: Any,
        position: int,
        sizes: Sizes,
        experts: Experts,
        last: bool,
    ) -> None:
        self._forward, self._experts = forward, experts
        starts = sizes.starts(len(tokens))
        ends_at = [*starts[1:], len(tokens)]
        parts = [(tokens[at:stop], seen_at(cache, position + at)) for at, stop in zip(starts, ends_at, strict=True)]
        ends = [False] * (len(parts) - 1) + [last]
        self._chunks = [
            Coroutine(partial(self._run_chunk, some, view, end)) for (some, view), end in zip(parts, ends, strict=True)
        ]
        self._counts = [len(some) for some, _ in parts]
        self._block = sizes.block
        self._numbers = tuple(row // sizes.block for row in range(len(tokens)))

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
        with at_once(), in_blocks(self._block):
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
