"""How large a model is, from its configuration alone: built and run on the meta device, where tensors have no bytes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from checkpoint import family, kv
from checkpoint.sizes.configured_size import has_head, head_beside
from scheduler.errors import UnsupportedFamilyError
from scheduler.types import ModelSize

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_SHAPES = "odmoe_shapes"
_NOT_QUANTISED = frozenset({"gate", "router", "shared_expert_gate"})


def count(config: PreTrainedConfig, dtype: torch.dtype, context: int, name: str = "model") -> ModelSize:
    """With a cache of `context` tokens, or as many as the model can take.

    Raises CheckpointError, NotMoEError or UnsupportedFamilyError.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    config = copy.deepcopy(config)  # what follows sets how a model of this configuration computes its experts
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
    tied = head is not None and bool(getattr(config, "tie_word_embeddings", False))
    if tied:  # on the meta device they are two
        head_elements = _elements(head.parameters())
        dense -= head_elements if head.weight is not embedding.weight else 0
    context = min(context, shape.context)
    dtype_name = family.dtype_name(dtype)
    row, state = _cache_bytes(model, config, 1, dtype)
    cache = row * context + state if kv.is_linear(config) else sum(_cache_bytes(model, config, context, dtype))
    return ModelSize(
        name=f"{name} ({config.model_type}, {dtype_name})",
        dtype=dtype_name,
        item_bytes=dtype.itemsize,
        depth=config.get_text_config().num_hidden_layers,
        layers=len(shape.layers),
        experts=shape.experts,
        top_k=shape.top_k,
        hidden=shape.hidden,
        expert=max(by_layer[layer] // numbers[layer] for layer in modules),
        experts_all=experts_all,
        dense=dense,
        read=dense - (0 if tied else _elements(embedding.parameters())),
        linear=_quantisable(model, head),
        cache_token=row // dtype.itemsize,
        cache=cache // dtype.itemsize,
        state=state // dtype.itemsize,
        context=context,
        context_max=shape.context,
        head=_head(model, config),
    )


def _head(model: Any, config: PreTrainedConfig) -> int:
    """Of the model's multi-token-prediction layer, which is as its last one."""
    if not has_head(config.model_type, getattr(config, "num_nextn_predict_layers", None)):
        return 0
    last = model.base_model.layers[-1]
    return _elements(last.parameters()) + head_beside(config.hidden_size) - 2 * config.hidden_size


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


def _cache_bytes(model: Any, config: PreTrainedConfig, tokens: int, dtype: torch.dtype) -> tuple[int, int]:
    """Of rows and of states, of the family's own cache after a pass over so many tokens; where a family has no pass
    over shapes alone, those of ordinary attention. Raises UnsupportedFamilyError where its configuration has no heads
    either."""
    cache = family.new_cache(config)
    ids = torch.zeros((1, tokens), dtype=torch.int64, device="meta")
    with contextlib.suppress(Exception), torch.inference_mode():
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        states = sum(state.nbytes for state in kv.take(cache, 0, tokens).states)
        return kv.cache_bytes(cache) - states, states
    text = config.get_text_config()
    try:
        heads = text.num_key_value_heads or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return int(2 * heads * width * text.num_hidden_layers * tokens * dtype.itemsize), 0
    except (AttributeError, TypeError) as error:
        raise UnsupportedFamilyError(
            f"how large the cache of this {config.model_type} is cannot be told from its configuration: {error}"
        ) from error
