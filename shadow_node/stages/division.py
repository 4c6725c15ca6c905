"""Which of a model's layers are here, where several processes share them, and what stands in the others' places.

Each process runs the family's own forward, so that masks and positions are made there as in a whole model. In the place
of a layer of another stage stands a module without weights. It keeps count of the rows in the cache, and the hidden
state goes through it, or from here to the stage that has the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from scheduler.errors import LaunchError, UnsupportedFamilyError
from scheduler.planning.cuts import cut
from shadow_node.layer_stack import LayerStack

CARRYING = {"gemma4_text", "glm_moe_dsa", "hy_v4", "inkling2_text", "mistral_large4_text", "zaya"}
"""Families whose layers give each other more than the hidden state."""


class Part(NamedTuple):
    """Of a model over several processes."""

    number: int
    """From 0: the shadow node itself."""
    rooms: tuple[int, ...]
    """Bytes of memory of each process. All of them must be given the same, since the cut follows from it."""


WHOLE = Part(0, (1,))


@dataclass(slots=True)
class Running:
    """A pass in this process."""

    cache: Any
    elsewhere: Callable[[int, torch.Tensor], torch.Tensor]
    """(layer, hidden state) -> what goes on, at each layer of another stage."""
    given: torch.Tensor | None = None
    """[1, T, ...]: what the first layer here reads, in a later stage."""


RUNNING: ContextVar[Running] = ContextVar("running")
"""A coroutine has a context of its own, so passes that take turns on a thread each have theirs."""


class Division:
    """Of one process. `experts`: elements of all experts of each layer."""

    def __init__(self, part: Part, scheme: str, experts: Mapping[int, int]) -> None:
        self.part = part
        self.first, self.stop = 0, 0
        """The layers here."""
        self.starts: list[int] = []
        """The first layer of each part."""
        self.depth = 0
        self._scheme = scheme
        self._experts = experts

    @property
    def is_last(self) -> bool:
        return self.part.number == len(self.part.rooms) - 1

    def divide(self, model: Any) -> None:
        """Take the others' layers out of a model that has no weights yet. Raises LaunchError where one part would have
        no layer with experts, UnsupportedFamilyError."""
        if len(self.part.rooms) == 1:
            return
        kind = model.config.get_text_config().model_type
        if kind in CARRYING:
            raise UnsupportedFamilyError(
                f"layers of {kind} hand on more than the hidden state, so they cannot be divided over processes; give "
                "--shadow-hosts 1, and several devices with --shadow-device"
            )
        stack = LayerStack(model)
        sizes, rest = stack.sizes(model, self._scheme, self._experts)
        head = sum(p.nbytes for p in model.get_output_embeddings().parameters())
        parts = len(self.part.rooms)
        if len(sizes) < parts:
            raise LaunchError(f"the shadow has {len(sizes)} layers for {parts} processes; give fewer --shadow-hosts")
        counts = cut(sizes, self.part.rooms, max(0, rest - head), head, least=1)
        ends = [0, *accumulate(counts)]
        for number, (first, stop) in enumerate(pairwise(ends)):
            if not any(first <= layer < stop for layer in self._experts):
                raise LaunchError(
                    f"part {number} of {parts} of the shadow would have the layers {first} to {stop - 1}, none of them "
                    f"with experts; give fewer --shadow-hosts than {parts}"
                )
        self.starts, self.depth = ends[:-1], ends[-1]
        self.first, self.stop = ends[self.part.number], ends[self.part.number + 1]
        for number, layer in enumerate(list(stack.layers)):
            if not self.first <= number < self.stop:
                stack.layers[number] = _Elsewhere(number, layer)
        if self.part.number:
            stack.layers[self.first].register_forward_pre_hook(_give, with_kwargs=True)

    def close_ends(self, model: Any) -> None:
        """Drop the embeddings of a model that reads none, and the output head of one whose last layer is elsewhere."""
        dropped: list[tuple[nn.Module, nn.Module]] = []
        if self.part.number:
            dropped.append((model.get_input_embeddings(), _NoEmbeddings(model.config.get_text_config().hidden_size)))
        if not self.is_last:
            dropped.append((model.get_output_embeddings(), _NoHead()))
        for module, other in dropped:
            name = next(name for name, found in model.named_modules() if found is module)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, other)


class _Elsewhere(nn.Module):
    """In the place of a layer of another stage."""

    def __init__(self, number: int, layer: nn.Module) -> None:
        super().__init__()
        self.number = number
        for name, value in vars(layer).items():  # a family's forward may ask for a layer's type
            if not name.startswith("_") and isinstance(value, bool | int | float | str):
                setattr(self, name, value)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """hidden [1, T, ...] -> the same shape."""
        running = RUNNING.get()
        _count_rows(running.cache, self.number, hidden)
        return running.elsewhere(self.number, hidden)


def _count_rows(cache: Any, layer: int, hidden: torch.Tensor) -> None:
    """Add rows of a byte to the cache of a layer that is elsewhere: positions and masks follow from their number. (Of
    empty ones Transformers counts none.)"""
    from transformers.cache_utils import CacheLayerMixin

    if layer >= len(cache.layers) or isinstance(cache.layers[layer], CacheLayerMixin):
        rows = hidden.new_zeros(1, 1, hidden.shape[1], 1, dtype=torch.uint8)
        cache.update(rows, rows[..., :0], layer)


def _give(layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A pre-hook of a later stage's first layer."""
    given = RUNNING.get().given
    return ((given, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": given})


class _NoEmbeddings(nn.Module):
    """In a later stage. The hidden state comes from the stage before."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [1, T] -> zeros [1, T, H]"""
        given: Any = RUNNING.get().given
        zeros: torch.Tensor = given.new_zeros(*ids.shape, self._hidden)
        return zeros


class _NoHead(nn.Module):
    """Where the last stage has the output head."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [1, T, H] -> [1, T, 1]"""
        return hidden[..., :1]
