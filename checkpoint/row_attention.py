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
_PIECE_VALUES = 1 << 18
"""Of keys, and of values, that are in float32 at a time: as many as stay in the processor's second cache."""


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
    if not _is_plain(query, attention_mask, given):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **given
        )
        return found
    heads, width = key.shape[1], query.shape[3]
    rows = query.reshape(heads, -1, width).float() * (width**-0.5 if scaling is None else scaling)
    attended = _attended(rows, key[0], value[0])
    return attended.to(query.dtype).view(1, 1, query.shape[1], value.shape[3]), None


def _attended(rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """rows [heads, n, D], key and value [heads, length, D] -> [heads, n, D], in float32.

    Of a long cache only pieces are in float32 at a time.
    """
    step = max(_PIECE_VALUES // (len(key) * rows.shape[2]), 1)
    if key.shape[1] <= step:
        return torch.matmul(torch.matmul(rows, key.float().mT).softmax(-1), value.float())
    scores = torch.cat([torch.matmul(rows, keys.float().mT) for keys in key.split(step, 1)], -1).softmax(-1)
    found = torch.zeros((), dtype=rows.dtype)
    for weights, values in zip(scores.split(step, -1), value.split(step, 1), strict=True):
        found = found + torch.matmul(weights, values.float())
    return found


def _is_plain(query: torch.Tensor, mask: torch.Tensor | None, given: dict[str, Any]) -> bool:
    """Whether it is a single row of 16 bits, with nothing but softmax between the products."""
    is_row = query.shape[:3:2] == (1, 1) and query.is_cpu and query.dtype.itemsize == 2
    is_changed = given.get("dropout") or any(given.get(name) is not None for name in _CHANGES)
    return is_row and not is_changed and (mask is None or (mask.dtype is torch.bool and bool(mask.all())))


_CHANGES = ("softcap", "s_aux", "position_bias", "cache")
"""Arguments of `sdpa` that change what is computed."""
