"""What the dense part of a model takes less where a store keeps its linear layers in few bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from checkpoint.quantisation import BITS, DEFAULT_GROUP
from scheduler.types import ModelSize

_WIDTHS = (
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("q_lora_rank", "kv_lora_rank"),
)
"""Inputs of the linear layers of families whose sizes config.json gives, beside those of heads together."""


def with_encoded_dense(size: ModelSize, fields: Mapping[str, Any], kept: str, known: bool = False) -> ModelSize:
    """The size with `dense_saved`, as of a store that keeps the dense part in this way (`checkpoint/encoded_dense.py`).

    `fields`: config.json. `known`: of a family of `configured_size`. Otherwise, or if rows are no multiple of a group,
    it imports torch, and builds the model without its bytes. Raises CheckpointError.
    """
    if kept not in BITS:
        return size
    if known and _all_in_groups(fields):
        head = 0 if fields.get("tie_word_embeddings") else fields["vocab_size"] * size.hidden
        bits = BITS[kept] + (1 if kept == "int8" else 2) * 16 / DEFAULT_GROUP
        return replace(size, dense_saved=round((size.linear + head) * (size.item_bytes - bits / 8)))
    from checkpoint.encoded_dense import encodable_layers, encoded_bytes
    from checkpoint.family import config_from_dict, parse_dtype

    shapes = encodable_layers(config_from_dict(dict(fields)), parse_dtype(size.dtype)).values()
    saved = sum(math.prod(shape) * size.item_bytes - encoded_bytes(kept, shape) for shape in shapes)
    return replace(size, dense_saved=saved)


def _all_in_groups(fields: Mapping[str, Any]) -> bool:
    heads = fields["num_attention_heads"]
    values = fields.get("v_head_dim") or fields.get("head_dim") or fields["hidden_size"] // heads
    widths = [heads * values, *(fields[key] for key in _WIDTHS if fields.get(key))]
    return all(width % DEFAULT_GROUP == 0 for width in widths)


def saved_in_store(manifest: Mapping[str, Any], item_bytes: int) -> int:
    """Of a store's manifest, which whoever opens the store checks. `item_bytes`: of an element in computations."""
    weights, held = manifest.get("dense_weights", 0), manifest.get("dense_bytes", 0)
    return weights * item_bytes - held if isinstance(weights, int) and isinstance(held, int) else 0
