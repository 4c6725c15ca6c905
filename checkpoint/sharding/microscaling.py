"""Weights in MXFP4, as the OCP Microscaling Formats (MX) Specification 1.0 converts them (section 6.3).

A block's scale is the power of two of its largest weight, less that of E2M1's largest number. Numbers are rounded to
the nearest, ties to even; beyond the largest, 6, they become that.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from checkpoint.native.encoding import CODES, SCALES
from checkpoint.native.mxfp4 import BLOCK, VALUES

_LARGEST_EXPONENT = 2
"""Of E2M1: 4 is 2^2, and 6 is 1.5 times that."""
_BIAS = 127
_MINUS = 8


def _bounds() -> list[float]:
    """The largest number that is rounded to each code but the last: halfway to the next one, or just below, where
    that is the even one."""
    halfway = torch.tensor([(low + high) / 2 for low, high in pairwise(VALUES)])
    below = torch.nextafter(halfway, torch.zeros(()))
    return [float((below if code % 2 else halfway)[code]) for code in range(len(halfway))]


_BOUNDS = torch.tensor(_bounds())


def in_mxfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Codes, uint8 [rows, columns / 32, 16] with the earlier in the low bits, and scales, uint8 [rows, columns / 32],
    of a finite weight [rows, columns] in any float dtype."""
    blocks = weight.float().contiguous().view(len(weight), -1, BLOCK)
    exponents = blocks.abs().amax(-1).view(torch.int32) >> 23
    scales = (exponents - _LARGEST_EXPONENT).clamp_(min=0)
    numbers = torch.ldexp(blocks, (_BIAS - scales).unsqueeze(-1))
    codes = torch.bucketize(numbers.abs(), _BOUNDS, out_int32=True).to(torch.uint8)
    codes.add_(numbers.signbit().to(torch.uint8), alpha=_MINUS)
    return {CODES: codes[..., 0::2] | codes[..., 1::2] << 4, SCALES: scales.to(torch.uint8)}
