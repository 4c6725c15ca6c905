"""One MoE layer under way: the rows of each expert, and its outputs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import itemgetter

import torch

from checkpoint.coroutine import in_coroutine, suspend
from checkpoint.tensors import tensor_bytes
from main_node.checks.suspects import Source
from scheduler import types as t
from wire import messages as w
from wire.checksums import tensor_checksum
from wire.lent_threads import LentThreads

Reweigh = Callable[[tuple[tuple[int, ...], ...]], tuple[torch.Tensor, torch.Tensor]]
"""For each row its experts -> index and weights [T, k]; -1 and 0 where a row has fewer."""
_ALIGN = 64
_FIRST = torch.zeros(1, dtype=torch.int64)


@dataclass(slots=True)
class LayerWait:
    """What a pass in lock-step is suspended with. It is resumed with True once it is `ready`, and with False where the
    step has waited for longer than `within_s` and nothing was ready."""

    layer: LayerWork
    ready: Callable[[], bool]
    within_s: float
    foresight: bool
    """It goes on with work for a predictor, which comes after every pass's own work."""


class LayersInFlight(dict[t.Visit, "LayerWork"]):
    """The layers that the main model waits for."""

    def resume(self, visit: t.Visit) -> None:
        if visit in self:
            self[visit].finish()

    def route(self, command: t.Route) -> None:
        """The router's decision, before any row of the layer is sent."""
        if command.visit in self:
            self[command.visit].route(command.experts, command.resident)

    def release(self, request: int) -> None:
        """Nothing need wait for a layer of this request any more."""
        for visit, layer in self.items():
            if visit.request == request:
                layer.finish()


class LayerWork:
    """Gathers rows and adds outputs in the order of the family's eager forward, so that the result is the same to the
    last bit (unless mini-batches split an expert's rows).

    hidden [T, H], index and weights [T, k]: the gate's output. `lent`: the threads that wait for layers.
    """

    _ends = itertools.count(1)

    def __init__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, lent: LentThreads) -> None:
        self.done = False
        """The layer is complete, or its request has failed."""
        self.ended = 0
        """Of several layers that are done, the one with the lowest number was done first."""
        self.hidden, self.index, self.weights = hidden, index, weights
        self.chosen: tuple[tuple[int, ...], ...] = ()
        self.scores: tuple[tuple[float, ...], ...] = ()
        """Both as in `GateFired`."""
        self.is_block = False
        """Its rows are passes of their own."""
        self.chunks: tuple[int, ...] = ()
        """Of each row, the chunk of a prompt that it is in; empty: all are in one."""
        self.reweigh: Reweigh | None = None
        """Routing weights where the router replaces the gate's choice."""
        self._like = hidden
        self._counts: dict[int, int] = {}
        self._tokens: dict[int, torch.Tensor] = {}
        self._hidden: dict[int, torch.Tensor] = {}
        self._weights: dict[int, torch.Tensor] = {}
        self._outputs: dict[int, dict[int, torch.Tensor]] = {}
        self._resident: frozenset[int] = frozenset()
        self._owed: set[int] = set()
        self.not_finite: dict[tuple[int, int], Source] = {}
        """Expert and first row -> the worker whose output of these rows was not finite. They are computed again."""
        self._here = False
        """The resident experts have answered."""
        self._lent = lent
        self._gather(index, weights)

    def _gather(self, index: torch.Tensor, weights: torch.Tensor) -> None:
        if index.shape[0] == 1 and len(set(experts := index[0].tolist())) == len(experts):
            self._gather_one(experts, weights)
            return
        by_choice = index.T  # [k, T]
        for expert in torch.unique(index).tolist():
            if expert < 0:  # a row that fewer experts compute
                continue
            place, token = torch.where(by_choice == expert)
            self._counts[expert] = len(token)
            self._tokens[expert] = token
            self._weights[expert] = weights[token, place]
            self._gather_rows(expert, token)

    def _gather_rows(self, expert: int, token: torch.Tensor) -> None:
        self._hidden[expert] = self.hidden[token]

    def _gather_one(self, experts: list[int], weights: torch.Tensor) -> None:
        """A single token, as in decoding: every expert gets the same row. It is copied only where its address is not
        aligned as torch would align it, since the last bit of a float32 product depends on that."""
        row = self._row()
        for expert, weight in sorted(zip(experts, weights[0].split(1), strict=True), key=itemgetter(0)):
            if expert >= 0:
                self._counts[expert] = 1
                self._tokens[expert] = _FIRST
                self._hidden[expert] = row
                self._weights[expert] = weight

    def _row(self) -> torch.Tensor:
        return self._like.clone() if self._like.data_ptr() % _ALIGN else self._like

    def route(self, experts: tuple[tuple[int, ...], ...], resident: tuple[int, ...]) -> None:
        """The scheduler has decided: `experts` of each row, empty where the gate's choice stands. The `resident` ones
        need no load."""
        if experts and self.reweigh is not None:
            self._counts.clear()
            self._tokens.clear()
            self._hidden.clear()
            self._weights.clear()
            self._gather(*self.reweigh(experts))
        self._resident = frozenset(resident)
        self._owed = set(resident)
        self._here = not resident

    def partial(self, within_s: float, if_all: bool = True) -> torch.Tensor | None:
        """The output of the resident experts [T, H], once they have answered. None: not within that time, the layer has
        ended, or all experts are resident and the output is not wanted `if_all` are."""
        if not if_all and self._resident.issuperset(self._counts):
            return None
        if not self._until(lambda: self._here, within_s, foresight=True) or any(
            expert not in self._outputs for expert in self._resident
        ):
            return None
        return self._combine(self._resident)

    @property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """(expert, how many rows), ascending."""
        return tuple(self._counts.items())

    def rows_of(self, command: t.Compute) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [n, H] and routing weights [n] of a command's rows."""
        expert = command.expert.expert
        hidden, weights = self._hidden[expert], self._weights[expert]
        if command.stop - command.start < self._counts[expert]:
            rows = slice(command.start, command.stop)
            hidden, weights = hidden[rows], weights[rows]
        return hidden, weights

    def passes_of(self, command: t.Compute) -> tuple[int, ...]:
        """See `w.Compute`."""
        if not (self.is_block or self.chunks) or command.stop - command.start == 1:
            return ()
        rows = self._tokens[command.expert.expert][command.start : command.stop].tolist()
        return itemgetter(*rows)(self.chunks) if self.chunks else tuple(rows)

    def keep(self, command: t.Compute, output: torch.Tensor) -> None:
        """A worker's answer [n, H]."""
        expert = command.expert.expert
        self._outputs.setdefault(expert, {})[command.start] = output
        if expert in self._owed and sum(map(len, self._outputs[expert].values())) == self._counts[expert]:
            self._owed.discard(expert)
            if not self._owed:
                self._here = True
                self._lent.wake()

    def output_of(self, command: t.Compute) -> torch.Tensor:
        """What `keep` has kept."""
        return self._outputs[command.expert.expert][command.start]

    def finish(self) -> None:
        """End every wait for it."""
        self.ended = self.ended or next(self._ends)
        self.done = self._here = True
        self._lent.wake()

    def wait(self, within_s: float) -> bool:
        """Until `done`. The calling thread computes meanwhile what is lent to it. False where that took longer."""
        return self._until(lambda: self.done, within_s)

    def yield_to_gates(self) -> None:
        """In lock-step, let the passes of other requests reach their gates first."""
        if in_coroutine():
            suspend(LayerWait(self, lambda: True, 0.0, foresight=True))

    def _until(self, ready: Callable[[], bool], within_s: float, foresight: bool = False) -> bool:
        if in_coroutine():
            return bool(suspend(LayerWait(self, ready, within_s, foresight)))
        return self._lent.run_until(ready, within_s)

    def combine(self) -> torch.Tensor:
        """The layer's output [T, H], once every row has been answered."""
        return self._combine(self._tokens)

    def _combine(self, experts: Collection[int]) -> torch.Tensor:
        outputs = {expert: self._output(expert) for expert in self._tokens if expert in experts}
        alone = self._like.shape[0] == 1 and all(self._counts[expert] == 1 for expert in outputs)
        if alone and outputs:  # the sum of index_add_, but for the sign of a zero, in fewer steps
            return functools.reduce(torch.add, outputs.values())
        result = torch.zeros_like(self._like)
        for expert, output in outputs.items():
            result.index_add_(0, self._numbers(expert), output)
        return result

    def _numbers(self, expert: int) -> torch.Tensor:
        """The numbers of an expert's rows, where the rows are."""
        return self._tokens[expert]

    def _output(self, expert: int) -> torch.Tensor:
        parts = self._outputs[expert]
        output = torch.cat([parts[start] for start in sorted(parts)]) if len(parts) > 1 else parts[0]
        return output if output.dtype == self._like.dtype else output.to(self._like)


def compute_message(
    command: t.Compute, rows: tuple[torch.Tensor, torch.Tensor], travels: bool, passes: tuple[int, ...] = ()
) -> w.Compute:
    """A command with its rows, for the worker. `travels`: to another process, so that a checksum goes with them.
    `passes`: see `w.Compute`."""
    hidden, weights = (w.LocalTensor(tensor, tensor_bytes) for tensor in rows)
    checksum = tensor_checksum(hidden, weights) if travels else 0
    return w.Compute(command.call_id, command.slot, *command.expert, hidden, weights, command.evict, checksum, passes)
