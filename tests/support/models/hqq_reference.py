"""Weights in fewer bits by HQQ's own quantiser, whose code has no part in the product's restoring."""

from __future__ import annotations

import math
from typing import Any

import torch
from hqq.core.quantize import Quantizer

from checkpoint.forms import GROUP


def by_hqq(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Quantised and restored, with scales and zeros in float16. The last group is filled with the last weight, and the
    last byte with groups."""
    flat = weight.flatten().float()
    rows = math.ceil(math.ceil(len(flat) / GROUP) / (8 // bits)) * (8 // bits)
    filled = torch.cat([flat, flat[-1].repeat(rows * GROUP - len(flat))]).view(rows, GROUP)
    packed, meta = Quantizer.quantize(filled, nbits=bits, group_size=GROUP, axis=1, device="cpu")
    meta |= {"scale": meta["scale"].half(), "zero": meta["zero"].half(), "compute_dtype": torch.float32}
    found: Any = Quantizer.dequantize(packed, meta)
    restored: torch.Tensor = found.flatten()[: len(flat)].view(weight.shape).to(weight.dtype)
    return restored
