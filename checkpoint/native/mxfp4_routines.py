"""Compiled products with MXFP4 weights [in, out] that are not restored; see `checkpoint/native/mxfp4_vectors.py`."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from numba import float32

from checkpoint.native.inputs_first_routines import SUMS
from checkpoint.native.mxfp4_vectors import BLOCK, block_in_four_sums, block_product
from checkpoint.native.product_scratch import TILE
from checkpoint.native.routines import _rounded, compiled
from checkpoint.native.row_vectors import ROWS

WIDE, NARROW = 32, TILE
"""Bytes of codes of a row of an MXFP4 weight that are multiplied at once, with one row of inputs and with several."""


@cache
def mxfp4_product() -> Any:
    """The product with MXFP4 [in, out] (`checkpoint/native/mxfp4.py`), for at least 2 * NARROW columns."""
    one, one_narrow, some = block_product(1, WIDE), block_product(1, NARROW), block_product(ROWS, NARROW)

    @partial(compiled, reassociates=True)
    def product(found: Any, inputs: Any, steps: Any, codes: Any, scales: Any, first: int, last: int, own: Any) -> None:
        """found: float32 [n, out], of which columns `first` to `last`, both even, are computed; inputs, steps: from
        `quantise`, in chunks of 32; codes: uint8 [in, out / 2]; scales: uint8 [in / 32, out]; own: sums, float32
        [ROWS * out].

        Blocks of rows of the weight come one after the other, and in each its tiles: a row's next bytes are then never
        far. The last tile may repeat columns of the one before.
        """
        begin, end, stride = first // 2, last // 2, codes.shape[1]
        done = 0
        while done < len(inputs):
            count = ROWS if len(inputs) - done >= ROWS else 1
            sums = own[: 2 * count * (end - begin + WIDE)]
            sums[:] = 0
            for block in range(len(scales)):
                given = inputs[done, BLOCK * block :].ctypes.data
                levels = steps[done, block:].ctypes.data
                start, target = begin, sums.ctypes.data
                while start < end:
                    width = WIDE if count == 1 and end - start >= WIDE else NARROW
                    at = min(start, max(end - width, 0))
                    address, scale = codes[BLOCK * block, at:].ctypes.data, scales[block, 2 * at :].ctypes.data
                    if count == ROWS:
                        some(address, stride, given, 2 * inputs.shape[1], scale, levels, 4 * steps.shape[1], target)
                    elif width == WIDE:
                        one(address, stride, given, 0, scale, levels, 0, target)
                    else:
                        one_narrow(address, stride, given, 0, scale, levels, 0, target)
                    start += width
                    target += 8 * count * width
            start, place = begin, 0
            while start < end:
                width = WIDE if count == 1 and end - start >= WIDE else NARROW
                at = min(start, max(end - width, 0))
                for number in range(count):
                    target, held = found[done + number, 2 * at : 2 * (at + width)], sums[place : place + 2 * width]
                    for column in range(width):
                        target[2 * column], target[2 * column + 1] = held[column], held[width + column]
                    place += 2 * width
                start += width
            done += count

    return product


@cache
def mxfp4_in_four_sums() -> Any:
    """One row times MXFP4, with the bits of `inputs_first_routines.inputs_first`."""
    add = block_in_four_sums(NARROW)

    @compiled
    def product(found: Any, row: Any, codes: Any, scales: Any, sums: Any, first: int, last: int) -> None:
        """found: uint16 [out], bfloat16, of which the pairs of columns `first` to `last` are computed; row: float32
        [in]; codes: uint8 [in, out / 2]; scales: uint8 [in / 32, out]; sums: float32 [SUMS * 2 * (pairs + NARROW)]."""
        stride = codes.shape[1]
        sums[:] = 0
        for block in range(len(scales)):
            start, target = first, sums.ctypes.data
            while start < last:
                at = min(start, max(last - NARROW, 0))
                address, scale = codes[BLOCK * block, at:].ctypes.data, scales[block, 2 * at :].ctypes.data
                add(address, stride, row[BLOCK * block :].ctypes.data, scale, target)
                start += NARROW
                target += 8 * SUMS * NARROW
        start, place = first, 0
        while start < last:
            at = min(start, max(last - NARROW, 0))
            for column in range(2 * NARROW):
                own = sums[place + column // 2 + column % 2 * NARROW :]
                total = own[0]
                for number in range(1, SUMS):
                    total = float32(total + own[number * 2 * NARROW])
                found[2 * at + column] = _rounded(total)
            start += NARROW
            place += 2 * SUMS * NARROW

    return product
