"""Passes whose rows have the same bits however a prompt is divided, so that none need be cut for the prefix cache.

A product of few rows sums in another order than one of many, and attention in another order for other numbers of keys.
From `LEAST_ROWS` rows on, and with keys in whole blocks of torch's flash attention, the libraries of a CPU mostly keep
to one order. They do not promise it: `is_indifferent` and `are_rows_alike` compare, once at a start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from checkpoint import family, kv
from checkpoint.dense import dispatch_experts
from checkpoint.devices.inference import inference

LEAST_ROWS = 16
"""Of a product whose rows have the bits of a larger one. Passes begin at multiples of it."""
_KEYS = 512
"""Keys that torch's flash attention on a CPU multiplies at once."""
_QUERIES = 512
"""Queries of a tile. More would be multiplied with more keys that they do not see."""
_ATTENTION = "fixed_sdpa"
_LAYERS = 4
"""Of a model that are compared: all layers of a kind have the same shapes."""
_TOKENS, _CUTS = 656, (32, 576, 640)
"""Of the prompt that is compared, and where it is cut: few rows, many, few keys, more than a block of them."""
_COUNTS = (16, 17, 31, 48, 100, 257)
"""Rows of a product, whose bits are compared with those of all counts in one."""

_on: ContextVar[bool] = ContextVar("fixed_shapes", default=False)


@contextmanager
def fixed_shapes() -> Iterator[None]:
    """Meanwhile, in this coroutine or thread, attention of a model that was `prepare`d has fixed shapes."""
    token = _on.set(True)
    try:
        yield
    finally:
        _on.reset(token)


def prepare(model: Any) -> bool:
    """Let the model's attention be switched. False where it does not use torch's."""
    if model.config._attn_implementation != "sdpa":
        return False
    AttentionInterface.register(_ATTENTION, _attention)
    AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
    model.set_attn_implementation(_ATTENTION)
    return True


def restore(model: Any) -> None:
    """Undo `prepare`."""
    model.set_attn_implementation("sdpa")


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **more: Any
) -> tuple[torch.Tensor, None]:
    """As Transformers' `sdpa`: [B, heads, n, D], keys [B, heads, s, D] -> [B, n, heads, D]."""
    if not _on.get() or query.shape[2] < LEAST_ROWS or more.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, mask, **more)
    rows, count = query.shape[2], key.shape[2]
    first, over = count - rows, -count % _KEYS
    key, value = (functional.pad(tensor, (0, 0, 0, over)) for tensor in (key, value))
    if mask is None:
        mask = torch.ones(rows, count, dtype=torch.bool, device=query.device).tril(first)[None, None]
    hidden = False if mask.dtype is torch.bool else float("-inf")
    query = functional.pad(query, (0, 0, 0, -rows % LEAST_ROWS))
    mask = functional.pad(mask, (0, over), value=hidden)
    found, at = [], first
    while at < count:
        stop = min(count, (at // _QUERIES + 1) * _QUERIES)
        own, keys = slice(at - first, stop - first + -(stop - at) % LEAST_ROWS), -(-stop // _KEYS) * _KEYS
        seen = functional.pad(mask[:, :, at - first : stop - first, :keys], (0, 0, 0, -(stop - at) % LEAST_ROWS))
        output, _ = sdpa_attention_forward(module, query[:, :, own], key[:, :, :keys], value[:, :, :keys], seen, **more)
        found.append(output[:, : stop - at])
        at = stop
    return torch.cat(found, dim=1), None


def is_indifferent(model: Any) -> bool:
    """Whether a `prepare`d model's rows have the same bits in all divisions of a prompt, experts left out. Its experts
    are dispatched to a stand-in, and stay so."""
    config = model.config.get_text_config()
    layers, config.num_hidden_layers = config.num_hidden_layers, min(config.num_hidden_layers, _LAYERS)
    dispatch_experts(model, lambda layer: _stand_in)
    tokens = torch.randint(config.vocab_size, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    try:
        with inference(), fixed_shapes():
            whole = _read(model, tokens, ())
            return all(_same(whole, _read(model, tokens, cuts)) for cuts in (_CUTS, (_CUTS[1],), (_CUTS[0],)))
    finally:
        config.num_hidden_layers = layers


def _stand_in(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """An output that shows every difference of the gate's, and computes each row by itself."""
    return hidden * (weights[:, :1] * (index[:, :1] + 1)).to(hidden)


def _read(model: Any, tokens: torch.Tensor, cuts: tuple[int, ...]) -> list[torch.Tensor]:
    """Rows of the cache and the last logits, after a prompt that is read in parts."""
    cache, logits = family.new_cache(model.config), tokens
    for part in tokens.tensor_split(cuts, dim=1):
        logits = model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return [*(row.tensor for layer in cache.layers for row in kv.growing_of(layer).values()), logits]


def _same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def are_rows_alike(
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], hidden: torch.Tensor, weights: torch.Tensor
) -> bool:
    """Whether an expert computes rows to the same bits in computations of `LEAST_ROWS` rows and more. `hidden` [n, H]
    and `weights` [n]: `ROWS_COMPARED` rows, of which none is zero."""
    whole = compute(hidden, weights)
    for count in _COUNTS:
        for start in range(0, len(hidden) - count + 1, count):
            part = slice(start, start + count)
            if not torch.equal(compute(hidden[part].clone(), weights[part].clone()), whole[part]):
                return False
    return True


ROWS_COMPARED = 2 * max(_COUNTS)
