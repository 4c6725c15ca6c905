"""The bytes of a shadow's weights, and the recall that is known of it, by its precision."""

from __future__ import annotations

from typing import NamedTuple

RECALLS = {"fp16": 0.9994, "int8": 0.9734, "nf4": 0.9567}
"""OD-MoE section 3.2: tokens and KV rows aligned after every token."""


class ShadowBytes(NamedTuple):
    """Bytes per element of a shadow's quantised weights."""

    linear: float
    """Of the dense part's linear layers."""
    expert: float
    restored: float = 0.0
    """That are written and read again to restore an expert."""


_NF4 = 0.5 + 4 / 64
SHADOW_BYTES = {
    "fp16": ShadowBytes(2.0, 2.0),
    "int8": ShadowBytes(1.0, 1.0),
    "nf4": ShadowBytes(_NF4, _NF4),
    "int8-nf4": ShadowBytes(1.0, _NF4),
    "int8-int2": ShadowBytes(1.0, 0.25 + 4 / 64, restored=2 * 2.0),
}
"""nf4 has a float32 scale per block of 64, int2 two of 16 bits; int8's scales, one per row, are neglected."""

NO_SHADOW = ShadowBytes(0.0, 0.0)
