"""The size of a model, from its configuration alone: it is built and run on the meta device, without bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from checkpoint import family, kv
from scheduler.errors import UnsupportedFamilyError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_SHAPES = "odmoe_shapes"
_NOT_QUANTISED = frozenset({"gate", "router", "shared_expert_gate"})


@dataclass(frozen=True, slots=True)
class Counts:
    """The shape of a model and the sizes of its parts: parameters as numbers of elements, the cache in bytes."""

    family: str
    dtype: str
    item_bytes: int
    depth: int
    """Layers of any kind."""
    moe_layers: tuple[int, ...]
    experts: int
    top_k: int
    hidden: int
    expert: int
    """Elements of the largest expert."""
    experts_all: int
    """Elements of all experts."""
    dense: int
    """Elements of everything else."""
    read: int
    """Those of `dense` that a token's pass reads: not the input embeddings, unless they are the head as well."""
    linear: int
    """Those of `read` that a quantised shadow quantises."""
    cache_token_bytes: int
    """Keys, values and states of all layers after one token."""
    cache_bytes: int
    """The same after `context` tokens."""
    context: int
    context_max: int
    """The model's own limit."""


def count(config: PreTrainedConfig, dtype: torch.dtype, context: int) -> Counts:
    """Raises CheckpointError, NotMoEError or UnsupportedFamilyError."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    model = family.meta_model(config, dtype)
    ALL_EXPERTS_FUNCTIONS.register(_SHAPES, _no_arithmetic)
    model.set_experts_implementation(_SHAPES)
    modules = family.experts_modules(model)
    by_layer = {layer: _elements(family.expert_parameters(*found).values()) for layer, found in modules.items()}
    numbers = {layer: family.expert_count(module) for layer, (_, module) in modules.items()}
    shape = family.shape_of(config, tuple(modules), max(numbers.values()), tuple(numbers.values()))
    experts_all = sum(by_layer.values())
    dense = _elements(model.parameters()) - experts_all
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
    if tied:  # on the meta device they are two
        head_elements = _elements(head.parameters())
        dense -= head_elements if head.weight is not embedding.weight else 0
    context = min(context, shape.context)
    return Counts(
        family=config.model_type,
        dtype=family.dtype_name(dtype),
        item_bytes=dtype.itemsize,
        depth=config.get_text_config().num_hidden_layers,
        moe_layers=shape.layers,
        experts=shape.experts,
        top_k=shape.top_k,
        hidden=shape.hidden,
        expert=max(by_layer[layer] // numbers[layer] for layer in modules),
        experts_all=experts_all,
        dense=dense,
        read=dense - (0 if tied else _elements(embedding.parameters())),
        linear=_quantisable(model, head),
        cache_token_bytes=_cache_bytes(model, config, 1, dtype),
        cache_bytes=_cache_bytes(model, config, context, dtype),
        context=context,
        context_max=shape.context,
    )


def _no_arithmetic(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(hidden)


def _elements(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _quantisable(model: Any, head: nn.Module | None) -> int:
    """Linear layers, less the head and the routers."""
    return sum(
        layer.weight.numel()
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear and layer is not head and _NOT_QUANTISED.isdisjoint(name.split("."))
    )


def _cache_bytes(model: Any, config: PreTrainedConfig, tokens: int, dtype: torch.dtype) -> int:
    """Size of the family's cache after a pass over `tokens` tokens. For a family that cannot run on shapes alone, it is
    that of ordinary attention. Raises UnsupportedFamilyError if its configuration has no heads either."""
    cache = family.new_cache(config)
    ids = torch.zeros((1, tokens), dtype=torch.int64, device="meta")
    with contextlib.suppress(Exception), torch.inference_mode():
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return kv.cache_bytes(cache)
    text = config.get_text_config()
    try:
        heads = text.num_key_value_heads or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return int(2 * heads * width * text.num_hidden_layers * tokens * dtype.itemsize)
    except (AttributeError, TypeError) as error:
        raise UnsupportedFamilyError(
            f"how large the cache of this {config.model_type} is cannot be told from its configuration: {error}"
        ) from error
