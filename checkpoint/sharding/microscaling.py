"""Weights in MXFP4, as the OCP Microscaling Formats (MX) Specification 1.0 converts them (section 6.3).

A block's scale is the power of two of its largest weight, less that of E2M1's largest number. Numbers are rounded to
the nearest, ties to even; beyond the largest, 6, they become that.
"""

from __future__ import annotations

import torch

from checkpoint.native.encoding import CODES, SCALES
from checkpoint.native.mxfp4 import BLOCK

_LARGEST_EXPONENT = 2
"""Of E2M1: 4 is 2^2, and 6 is 1.5 times that."""
_BIAS = 127
_MINUS = 8
_MANTISSA, _DROPPED = 23, 22
"""Bits of a float32's mantissa, and those of them that E2M1 lacks."""
_OF_ONE, _MOST = 2, 7
"""Codes of 1 and of 6."""


def in_mxfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Codes, uint8 [rows, columns / 32, 16] with the earlier in the low bits, and scales, uint8 [rows, columns / 32],
    of a finite weight [rows, columns] in any float dtype."""
    blocks = weight.float().contiguous().view(len(weight), -1, BLOCK)
    exponents = blocks.abs().amax(-1).view(torch.int32) >> _MANTISSA
    scales = (exponents - _LARGEST_EXPONENT).clamp_(min=0)
    factors = (2 * _BIAS - scales << _MANTISSA).view(torch.float32)  # 2^(_BIAS - scale)
    numbers = blocks * factors.unsqueeze(-1)
    signs = numbers.signbit()
    codes = _nearest(numbers.abs_()).to(torch.uint8).add_(signs, alpha=_MINUS)
    return {CODES: codes[..., 0::2] | codes[..., 1::2] << 4, SCALES: scales.to(torch.uint8)}


def _nearest(numbers: torch.Tensor) -> torch.Tensor:
    """Codes, int32, of numbers in float32 from 0 to 8. From 1 on, E2M1 is the exponent and the first bit of a float32's
    mantissa, which the rest is rounded to. Below it has steps of 0.5."""
    bits = numbers.view(torch.int32)
    odd = (bits >> _DROPPED) & 1
    rounded = odd.add_(bits).add_((1 << _DROPPED - 1) - 1).bitwise_right_shift_(_DROPPED).sub_(2 * _BIAS - _OF_ONE)
    small = torch.round(2 * numbers).to(torch.int32)
    return torch.where(numbers < 1, small, rounded).clamp_(max=_MOST)
