"""One MoE layer under way: which rows each named expert gets, and what comes of them."""

from __future__ import annotations

import threading
from typing import Self

import torch

from checkpoint.tensors import tensor_bytes
from main_node.peers import read_output
from scheduler import types as t
from wire import messages as w

_ALIGN = 64
_FIRST = torch.zeros(1, dtype=torch.int64)


class UnderWay(dict[t.Visit, "LayerWork"]):
    """The layers that the main model waits for."""

    def resume(self, visit: t.Visit) -> None:
        if visit in self:
            self[visit].done.set()

    def release(self, request: int) -> None:
        """Whoever waits for a layer of this request need not any more."""
        for visit, layer in self.items():
            if visit.request == request:
                layer.done.set()


class LayerWork:
    """Rows are gathered and outputs added in the order of the family's eager forward, so that the result is the same to
    the last bit (unless mini-batches split an expert's rows).

    `done`: the scheduler has said to go on, or why not.
    """

    __slots__ = ("_hidden", "_like", "_outputs", "_tokens", "_weights", "done")

    def __init__(self, like: torch.Tensor) -> None:
        self.done = threading.Event()
        self._like = like
        self._tokens: dict[int, torch.Tensor] = {}
        self._hidden: dict[int, torch.Tensor] = {}
        self._weights: dict[int, torch.Tensor] = {}
        self._outputs: dict[int, dict[int, torch.Tensor]] = {}

    @classmethod
    def gather(cls, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Self:
        """hidden [T, H], index and weights [T, k]."""
        work = cls(hidden)
        if len(index) == 1 and len(set(named := index[0].tolist())) == len(named):
            work._gather_one(named, weights)
            return work
        by_choice = index.T  # [k, T]
        for expert in torch.unique(index).tolist():
            place, token = torch.where(by_choice == expert)
            work._tokens[expert] = token
            work._hidden[expert] = hidden[token]
            work._weights[expert] = weights[token, place]
        return work

    def _gather_one(self, named: list[int], weights: torch.Tensor) -> None:
        """A single token, as in decoding: every expert gets the same row, copied only where its address is not one that
        torch itself would choose: the last bit of a float32 product depends on that."""
        row = self._like.clone() if self._like.data_ptr() % _ALIGN else self._like
        for expert in sorted(named):
            place = named.index(expert)
            self._tokens[expert] = _FIRST
            self._hidden[expert] = row
            self._weights[expert] = weights[0, place : place + 1]

    @property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """(expert, how many rows), ascending."""
        return tuple((expert, len(token)) for expert, token in self._tokens.items())

    def message(self, command: t.Compute) -> w.Compute:
        """What the worker is sent."""
        expert, rows = command.expert.expert, slice(command.start, command.stop)
        return w.Compute(
            command.call_id, command.slot, *command.expert,
            w.Tensor(*tensor_bytes(self._hidden[expert][rows])),
            w.Tensor(*tensor_bytes(self._weights[expert][rows])),
            command.evict,
        )  # fmt: skip

    def keep(self, command: t.Compute, output: w.Tensor) -> None:
        """What the worker answered. Raises ProtocolError."""
        expert, rows = command.expert.expert, slice(command.start, command.stop)
        kept = read_output(output, self._hidden[expert][rows], self._weights[expert])
        self._outputs.setdefault(expert, {})[command.start] = kept

    def combine(self) -> torch.Tensor:
        """The layer's output [T, H], once every row has come."""
        result = torch.zeros_like(self._like)
        for expert, token in self._tokens.items():
            parts = self._outputs[expert]
            output = torch.cat([parts[start] for start in sorted(parts)]) if len(parts) > 1 else parts[0]
            result.index_add_(0, token, output.to(result))
        return result
