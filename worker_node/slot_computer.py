"""Computes rows with the experts that are in a worker's slots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from checkpoint.devices.transfer import to_device, to_host
from checkpoint.expert import ExpertArithmetic
from checkpoint.joint_rows import JOINT, by_pass, most_rows
from checkpoint.kernels import SHARED_ROWS
from checkpoint.store import ExpertStore
from scheduler.types import ExpertId
from wire.messages import Compute
from worker_node.loaders.base import Loader
from worker_node.module_cache import Module, ModuleCache
from worker_node.ready import Group, row_count, rows_of
from worker_node.restorer import MODULES, Restorer
from worker_node.slots import Slots


class SlotComputer:
    """Used by one computation at a time."""

    def __init__(
        self, store: ExpertStore, arithmetic: ExpertArithmetic, loader: Loader, slots: Slots, restorer: Restorer
    ) -> None:
        self.store = store
        self.loader = loader
        self.pace = loader.pace
        self.slots = slots
        self.restorer = restorer
        self.is_on_cpu = loader.device == "cpu"
        self._arithmetic = arithmetic
        self._modules = ModuleCache[Module](MODULES)

    @property
    def allocated_bytes(self) -> int:
        """Device memory of its slots, and of restoring."""
        return self.slots.allocated_bytes + self.restorer.allocated_bytes

    def compute(self, message: Compute, form: str = "") -> torch.Tensor:
        """The message's rows [n, H] through the expert in its slot, held in `form`: [n, H]; see `run`."""
        hidden, weights = rows_of([message])
        run = partial(self.run, message.slot, message.layer, form)
        if not message.passes:
            return run(hidden, weights)
        if self.pace.is_emulated or not self.is_on_cpu:
            return by_pass(run, hidden, weights, message.passes)
        if hidden.dtype.itemsize == 2 and not self._arithmetic.is_elementwise(message.layer):
            return by_pass(run, hidden, weights, message.passes)  # too few values differ for random rows to show it
        if len(hidden) <= SHARED_ROWS and self.is_rowwise(message.slot, message.layer, form):
            return run(hidden, weights)
        kind = self._arithmetic.kind(message.layer), form, self.restorer.layout(message.layer)
        manifest = self.store.manifest
        specs = manifest.full.get(message.layer, manifest.layers[message.layer].tensors)
        most = most_rows(sum(math.prod(spec.shape) for spec in specs))
        return JOINT.compute(kind, run, hidden, weights, message.passes, most)

    def run(self, slot: int, layer: int, form: str, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`hidden` [n, H] and `weights` [n] through the expert of `layer` in `slot`: [n, H], where `hidden` was."""
        buffer = self.slots.buffers[slot]
        with self.loader.computing(buffer):  # all of it on the stream that waits for the load
            stays = self.is_on_cpu or hidden.device == buffer.device
            if not stays:
                hidden, weights = to_device(buffer.device, hidden, weights)
            if self.restorer.restores(layer, form):
                output = self.restorer.compute(buffer, layer, form, hidden, weights, self.slots.occupancy(slot))
                return output if stays else to_host(output)[0]
            module = self._modules.get(
                (slot, layer), lambda: self._arithmetic.bind(layer, self.store.views(buffer, layer))
            )
            output = module(hidden, weights)
            return output if stays else to_host(output)[0]

    def compute_together(self, messages: Sequence[Compute], form: str = "") -> Sequence[torch.Tensor]:
        """As `compute`, of several messages for one slot, in one computation."""
        if len(messages) == 1:
            return (self.compute(messages[0], form),)
        output = self.run(messages[0].slot, messages[0].layer, form, *rows_of(messages))
        return output.split(list(map(row_count, messages)))

    def computes_together(self, layer: int, form: str) -> bool:
        """Whether `compute_layer` computes a layer's experts. Not in emulated time, where each takes its own."""
        return not self.pace.is_emulated and self.restorer.computes_together(layer, form)

    def compute_layer(self, groups: Sequence[Group]) -> Sequence[torch.Tensor]:
        """The rows of each group through the expert in its slot: [n, H]. All are of one layer, in the full form."""
        slots = [self.slots.buffers[group.occupancy.slot] for group in groups]
        hidden, weights = zip(*(rows_of(group.messages) for group in groups), strict=True)
        return self.restorer.compute_together(slots, groups[0].occupancy.expert.layer, hidden, weights)

    def is_rowwise(self, slot: int, layer: int, form: str) -> bool:
        """Whether computations with the expert in a slot can be made together without another bit in any output.

        Not in emulated time, where each takes its own.
        """
        buffer = self.slots.buffers[slot]
        if self.pace.is_emulated or not self.is_on_cpu:
            return False
        if self.restorer.restores(layer, form):
            return self.restorer.is_rowwise(buffer, layer, form)
        return self._arithmetic.is_rowwise(layer, self.store.views(buffer, layer))

    def share(self, expert: ExpertId, form: str) -> float:
        """The bytes of an expert's form over those of its full form."""
        if not form:
            return 1.0
        return self.store.locate(*expert, form)[1].length / self.store.locate(*expert)[1].length
