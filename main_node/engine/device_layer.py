"""One MoE layer under way, of a main model on an accelerator."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from checkpoint.devices.transfer import to_device, to_host
from main_node.engine.layer import LayerWork
from scheduler import types as t
from wire.lent_threads import LentThreads


class DeviceLayerWork(LayerWork):
    """As `LayerWork`, with the layer's rows on an accelerator.

    The scheduler and workers of other processes need values on the host. They come in one copy, which is the layer's
    only wait for the device: the gate's choice, its weights, its `scores` [T, E] where a policy reads them, and the
    rows where a worker needs them there. Outputs that workers return on the host go back in one copy, too.

    `stays(worker)`: the worker is in this process and on this device, so that rows and outputs stay there.
    `rows_leave`: some worker is not.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        lent: LentThreads,
        stays: Callable[[int], bool],
        rows_leave: bool,
        scores: torch.Tensor | None = None,
    ) -> None:
        self._stays = stays
        self._gate_weights = weights
        self._row_weights: dict[int, torch.Tensor] = {}
        """On the device, of each expert."""
        self._row_tokens: dict[int, torch.Tensor] = {}
        """Likewise, the rows' numbers."""
        extra = ([scores] if scores is not None else []) + ([hidden] if rows_leave else [])
        host_index, host_weights, *more = to_host(index, weights, *extra)
        self.gate_scores = more.pop(0) if scores is not None else None
        """`scores` on the host."""
        self._host_hidden = more.pop() if more else None
        self._host_rows: dict[int, torch.Tensor] = {}
        super().__init__(hidden, host_index, host_weights, lent)

    def _gather(self, index: torch.Tensor, weights: torch.Tensor) -> None:
        self._row_weights.clear()
        self._row_tokens.clear()
        self._host_rows.clear()
        super()._gather(index, weights)

    def _gather_rows(self, expert: int, token: torch.Tensor) -> None:
        """They are gathered where a worker needs them."""

    def _gather_one(self, experts: list[int], weights: torch.Tensor) -> None:
        super()._gather_one(experts, weights)
        if weights is self.weights:  # not the router's
            own = self._gate_weights[0].split(1)
            self._row_weights.update({expert: own[place] for place, expert in enumerate(experts) if expert >= 0})

    def _row(self) -> torch.Tensor:
        return self._like

    def rows_of(self, command: t.Compute) -> tuple[torch.Tensor, torch.Tensor]:
        """As in `LayerWork`: on the device or on the host, as the command's worker needs them."""
        expert = command.expert.expert
        hidden, weights = self._device_rows(expert) if self._stays(command.worker) else self._rows_on_host(expert)
        if command.stop - command.start < self._counts[expert]:
            rows = slice(command.start, command.stop)
            hidden, weights = hidden[rows], weights[rows]
        return hidden, weights

    def _device_rows(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        if expert not in self._row_weights:
            self._send_numbers()
        if expert not in self._hidden:
            self._hidden[expert] = self._like.index_select(0, self._row_tokens[expert])
        return self._hidden[expert], self._row_weights[expert]

    def _send_numbers(self) -> None:
        """The rows' numbers and weights of all experts go to the device, in one copy."""
        experts, device = list(self._counts), self._like.device
        sent = to_device(
            device, torch.cat([*self._tokens.values()]), torch.cat([self._weights[expert] for expert in experts])
        )
        counts = list(self._counts.values())
        self._row_tokens.update(zip(experts, sent[0].split(counts), strict=True))
        self._row_weights.update(zip(experts, sent[1].split(counts), strict=True))

    def _rows_on_host(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._host_hidden is None:  # a worker has come in the middle of the layer
            self._host_hidden = to_host(self._like)[0]
        if expert not in self._host_rows:
            one = len(self._host_hidden) == self._counts[expert] == 1
            self._host_rows[expert] = self._host_hidden if one else self._host_hidden[self._tokens[expert]]
        return self._host_rows[expert], self._weights[expert]

    def _combine(self, experts: Collection[int]) -> torch.Tensor:
        parts = [(expert, start) for expert in experts for start in self._outputs.get(expert, ())]
        landed = to_device(self._like.device, *(self._outputs[expert][start] for expert, start in parts))
        for (expert, start), output in zip(parts, landed, strict=True):
            self._outputs[expert][start] = output
        alone = len(self._like) == 1 and all(count == 1 for count in self._counts.values())
        if self._tokens and not alone and not self._row_tokens:
            self._send_numbers()
        return super()._combine(experts)

    def _numbers(self, expert: int) -> torch.Tensor:
        return self._row_tokens[expert]
