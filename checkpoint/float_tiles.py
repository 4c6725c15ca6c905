"""Products of several rows in 16 bits on a CPU that has no instructions for them: in float32, a tile of the weight at a
time.

Torch multiplies row by row there, as slowly as if each row came alone. A tile is converted once for all rows, and stays
in the cache. Sums are in another order, so this is the kernel `fast`.
"""

from __future__ import annotations

from functools import cache

import torch

LEAST_ROWS = 4
"""For fewer, converting the weight takes longer than it saves."""

_TILE_BYTES = 1 << 20
_DTYPES = (torch.bfloat16, torch.float16)


@cache
def is_faster() -> bool:
    """Whether this CPU is such a one: oneDNN has no products in bfloat16 for it."""
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def is_tiled(rows: int, weight: torch.Tensor) -> bool:
    """Whether so many rows are multiplied with `weight` by tiles."""
    return rows >= LEAST_ROWS and weight.dtype in _DTYPES and weight.device.type == "cpu" and is_faster()


def multiply_inputs_first(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[n, K], [K, N] -> [n, N], in the rows' dtype. Any number of rows: torch takes even longer for such a weight."""
    inputs, outputs = weight.shape
    wide, found = rows.float(), torch.zeros(len(rows), outputs, dtype=torch.float32)
    height = max(_TILE_BYTES // (4 * outputs), 1)
    tile = torch.empty(min(height, inputs), outputs, dtype=torch.float32)
    for part, given in zip(weight.split(height), wide.split(height, dim=1), strict=True):
        found.addmm_(given, tile[: len(part)].copy_(part))
    return found.to(rows.dtype)


def multiply(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[n, K], [N, K], [N] -> [n, N], in the rows' dtype."""
    outputs, inputs = weight.shape
    wide, found = rows.float(), torch.empty(len(rows), outputs, dtype=torch.float32)
    height = max(_TILE_BYTES // (4 * inputs), 1)
    tile = torch.empty(min(height, outputs), inputs, dtype=torch.float32)
    for part, target in zip(weight.split(height), found.split(height, dim=1), strict=True):
        torch.mm(wide, tile[: len(part)].copy_(part).t(), out=target)
    if bias is not None:
        found += bias
    return found.to(rows.dtype)
