"""Attention of a single row, in float32: the kernel `fast` on CPUs without AMX.

Torch's attention multiplies 16 bits there with plain loops, so that a token's attention takes longer than its products
once some hundred tokens are in the cache.
"""

from __future__ import annotations

from typing import Any

import torch

from checkpoint.kernels import is_faster

IMPLEMENTATION = "odmoe_rows"
"""The name under which it is registered with Transformers' attention functions."""


def use_row_attention(model: Any) -> None:
    """Let a model that attends with torch's attention attend single rows with this one."""
    if model.config._attn_implementation != "sdpa" or is_faster():  # then torch attends with AMX
        return
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, sdpa_mask)
    model.set_attn_implementation(IMPLEMENTATION)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """As Transformers' `sdpa`: query [B, heads, n, D], key and value [B, key heads, length, D] -> [B, n, heads, D]."""
    if attention_mask is not None or not _is_plain(query, given):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **given
        )
        return found
    heads, width = key.shape[1], query.shape[3]
    rows = query.reshape(heads, -1, width).float() * (width**-0.5 if scaling is None else scaling)
    scores = torch.matmul(rows, key[0].float().mT).softmax(-1)
    return torch.matmul(scores, value[0].float()).to(query.dtype).view(1, 1, query.shape[1], value.shape[3]), None


def _is_plain(query: torch.Tensor, given: dict[str, Any]) -> bool:
    """Whether it is a single row of 16 bits, with nothing but softmax between the products."""
    is_row = query.shape[:3:2] == (1, 1) and query.is_cpu and query.dtype.itemsize == 2
    return is_row and not given.get("dropout") and all(given.get(name) is None for name in _CHANGES)


_CHANGES = ("softcap", "s_aux", "position_bias", "cache")
"""Arguments of `sdpa` that change what is computed."""
