"""A compiled routine that restores weights [out, in] from the MXFP4 codes of their transpose.

See `checkpoint/native/routines.py` for why and how it is compiled.
"""

from __future__ import annotations

from typing import Any

from numba import uint16, uint64

from checkpoint.native.mxfp4 import BLOCK
from checkpoint.native.product_scratch import TURNED
from checkpoint.native.routines import compiled, mxfp4

_FOUR = 4
"""Values in bfloat16 that are written at once."""

_WORDS = BLOCK // _FOUR


@compiled
def restore_turned(
    target: Any, stride: int, codes: Any, scales: Any, values: Any, factors: Any, turned: Any, table: Any
) -> None:
    """target: uint64, four bfloat16 each, of rows that are `stride` apart; codes: uint8 [in, out / 2]; scales: uint8
    [in / 32, out]; values: uint32, 32 rows of `out` bfloat16, factors: uint32, and turned: uint64, scratch; table:
    uint16 [256, 16], see `mxfp4`."""
    pairs = codes.shape[1]
    of_block, outputs = values.reshape(BLOCK, pairs), 2 * pairs
    for block in range(len(scales)):
        rows = codes[BLOCK * block : BLOCK * (block + 1)]
        mxfp4(of_block, rows, scales[block : block + 1], factors[:pairs], table)
        for start in range(0, outputs, TURNED):
            count = min(TURNED, outputs - start)
            _turn(of_block, start, count, turned)
            for output in range(count):
                place = (start + output) * stride + _WORDS * block
                for word in range(_WORDS):
                    target[place + word] = turned[word * TURNED + output]


@compiled
def _turn(of_block: Any, start: int, count: int, turned: Any) -> None:
    """Fill `turned`, uint64 [32 / 4, TURNED], with four values of neighbouring rows each."""
    for word in range(_WORDS):
        found = turned[word * TURNED : word * TURNED + count]
        found[:] = 0
        for row in range(_FOUR):
            values, shift = of_block[_FOUR * word + row].view(uint16)[start : start + count], uint64(16 * row)
            for output in range(count):
                found[output] |= uint64(values[output]) << shift
