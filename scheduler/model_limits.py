"""The largest values that a model allows in a message between nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.types import ModelShape


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """A value of 0, or an empty one, is unknown: then a field has only the bound that holds for every model."""

    experts: Mapping[int, int] = field(default_factory=dict)
    """MoE layer -> its number of experts."""
    context: int = 0
    """Most tokens, prompt and answer together."""
    vocabulary: int = 0
    hidden: int = 0
    """Elements of one embedding."""
    widths: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """MoE layer -> what the width of its experts' rows may be: the dimensions of its experts' tensors."""
    depth: int = 0
    """Layers of any kind."""
    slots: int = 0
    """Of the worker at the other end, or of this one."""
    slot_bytes: int = 0
    """The largest expert of any form; the size of a slot once a worker has told its own."""
    least_slot_bytes: int = 0
    """No slot is smaller, whatever forms its worker loads."""


def limits_of_shape(shape: ModelShape) -> ModelLimits:
    """What a model's shape alone tells."""
    return ModelLimits(
        experts={layer: shape.count(ordinal) for ordinal, layer in enumerate(shape.layers)},
        context=shape.context,
        hidden=shape.hidden,
    )
