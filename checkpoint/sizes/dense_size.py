"""What the dense part of a model takes less where a store keeps its linear layers in few bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from checkpoint.quantisation import BITS
from scheduler.types import ModelSize


def with_encoded_dense(size: ModelSize, fields: Mapping[str, Any], kept: str) -> ModelSize:
    """The size with `dense_saved`, as of a store that keeps the dense part in this way (`checkpoint/encoded_dense.py`).

    `fields`: config.json. Imports torch, and builds the model without its bytes. Raises CheckpointError.
    """
    from checkpoint.encoded_dense import encodable_layers, encoded_bytes
    from checkpoint.family import config_from_dict, parse_dtype

    if kept not in BITS:
        return size
    shapes = encodable_layers(config_from_dict(dict(fields)), parse_dtype(size.dtype)).values()
    saved = sum(math.prod(shape) * size.item_bytes - encoded_bytes(kept, shape) for shape in shapes)
    return replace(size, dense_saved=saved)


def saved_in_store(manifest: Mapping[str, Any], item_bytes: int) -> int:
    """Of a store's manifest, which whoever opens the store checks. `item_bytes`: of an element in computations."""
    weights, held = manifest.get("dense_weights", 0), manifest.get("dense_bytes", 0)
    return weights * item_bytes - held if isinstance(weights, int) and isinstance(held, int) else 0
