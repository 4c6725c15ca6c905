"""Compiled products in bfloat16 with a weight [in, out], in the order of torch on a CPU that has no such instructions.

There torch takes each output's numbers from memory one by one, a column apart, and adds them up in four sums, of every
fourth product each (`sum` in ATen's CPUBlas.cpp). Here a row of the weight is read at a time, for many outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, uint32

from checkpoint.native.routines import _float_of_bits, _rounded, compiled

SUMS = 4
COLUMNS = 16384
"""Outputs, times rows of inputs, whose sums are added to together: they stay in the second cache. With so many, whole
rows of most weights are read, one after the other."""

ROWS = 4
"""Rows of inputs for which a strip of the weight is read together."""


@compiled
def inputs_first(found: Any, rows: Any, weight: Any, first: int, last: int, scratch: Any) -> None:
    """found: uint16 [n, out], bfloat16, of which columns `first` to `last` are computed; rows: uint16 [n, in]; weight:
    uint16 [in, out]; scratch: float32 [SUMS * COLUMNS]."""
    for begin in range(0, len(rows), ROWS):
        some = min(ROWS, len(rows) - begin)
        strip = COLUMNS if some == 1 else COLUMNS // ROWS
        for start in range(first, last, strip):
            end = min(start + strip, last)
            _strip(found[begin : begin + some], rows[begin : begin + some], weight, start, end, scratch)


@compiled
def _strip(found: Any, rows: Any, weight: Any, start: int, end: int, scratch: Any) -> None:
    inputs, count = rows.shape[1], end - start
    whole = inputs // SUMS * SUMS
    scratch[: len(rows) * SUMS * count] = 0
    for number in range(inputs):
        values = weight[number, start:end]
        place = number % SUMS if number < whole else 0
        for row in range(len(rows)):
            factor = _float_of_bits(uint32(rows[row, number]) << 16)
            sums = scratch[(row * SUMS + place) * count :][:count]
            for column in range(count):
                sums[column] += factor * _float_of_bits(uint32(values[column]) << 16)
    for row in range(len(rows)):
        target = found[row, start:end]
        sums = scratch[row * SUMS * count :]
        for column in range(count):
            total = sums[column]
            for place in range(1, SUMS):
                total = float32(total + sums[place * count + column])
            target[column] = _rounded(total) if abs(total) < np.inf else _bits_of(total)


@compiled
def _bits_of(total: Any) -> Any:
    """Of a sum that is NaN or infinite, in bfloat16."""
    if total > 0:
        return 0x7F80
    return 0xFF80 if total < 0 else 0x7FC0
