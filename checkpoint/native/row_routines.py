"""Compiled products of a few rows with an encoded weight that is not restored; see `checkpoint/native/row_vectors.py`.

A value of a weight is level * number - offset, where levels and offsets are those of a group of columns. So a product
is a sum over groups: level * (numbers times inputs) - offset * (sum of inputs).
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
from numba import float32, int16, uint32

from checkpoint.native.routines import _float_of_bits, _float_of_half, compiled
from checkpoint.native.row_vectors import ROWS, dots_of_eights, dots_of_numbers, unpacker

MOST = 32767
"""The largest size of an input as an integer."""

_summing = partial(compiled, reassociates=True)


@compiled
def _same(value: Any) -> Any:
    return float32(value)


@compiled
def _float_of_bfloat(bits: Any) -> Any:
    return _float_of_bits(uint32(bits) << 16)


FLOATS: dict[str, Any] = {"float32": _same, "bfloat16": _float_of_bfloat, "float16": _float_of_half}
"""By dtype: how its bits, as numpy has them, become a float32."""


def _quantiser(converted: Any) -> Any:
    @compiled
    def quantise(rows: Any, found: Any, levels: Any, sums: Any) -> None:
        """rows: [n, columns]; found: int16 [n, columns]; levels: float32 [n, chunks], one step of a chunk's integers;
        sums: float32 [n, groups], of the inputs. A chunk with NaN or infinity has NaN as its level."""
        columns, chunks, groups = rows.shape[1], levels.shape[1], sums.shape[1]
        width, wide = columns // chunks, columns // groups
        for row in range(len(rows)):
            for chunk in range(chunks):
                given, target = rows[row, chunk * width :][:width], found[row, chunk * width :][:width]
                largest = float32(0)
                is_finite = True
                for column in range(width):
                    size = abs(converted(given[column]))
                    is_finite &= size < np.inf
                    largest = max(largest, size)
                levels[row, chunk] = largest / float32(MOST) if is_finite else float32(np.nan)
                factor = float32(MOST) / largest if is_finite and largest > 0 else float32(0)
                for column in range(width):
                    value = converted(given[column]) * factor if is_finite else float32(0)
                    target[column] = int16(np.rint(value))
            for group in range(groups):
                total = float32(0)
                for column in range(group * wide, (group + 1) * wide):
                    total += converted(rows[row, column])
                sums[row, group] = total

    return quantise


@cache
def quantiser(dtype: str) -> Any:
    """Of rows of this dtype; those of 16 bits are given as uint16."""
    return _quantiser(FLOATS[dtype])


def _plain_levels(converted: Any) -> Any:
    @compiled
    def levels(target: Any, values: Any, units: Any, row: int) -> None:
        """target: float32 [groups], of this row; values: [rows, groups]; units: nothing."""
        for group in range(len(target)):
            target[group] = converted(values[row, group])

    return levels


@compiled
def _levels_in_steps(target: Any, values: Any, units: Any, row: int) -> None:
    """`values` are integers, multiples of `units`: float16 as uint16 [rows, some groups]."""
    each = len(target) // units.shape[1]
    for few in range(units.shape[1]):
        unit = _float_of_half(units[row, few])
        for group in range(few * each, (few + 1) * each):
            target[group] = float32(values[row, group]) * unit


LEVELS: dict[str, Any] = {name: _plain_levels(one) for name, one in FLOATS.items()} | {"steps": _levels_in_steps}

MIDDLE, ZEROS, MINIMUMS = "middle", "zeros", "minimums"
"""What offsets are made of: half of what the bits can hold, zeros, or minimums."""


@cache
def integer_product(bits: int, scales: str, offsets: str, minimums: str) -> Any:
    """The product with integers of so many bits (`checkpoint/native/integers.py`), whose scales, and minimums if there
    are any, are of these kinds, see `LEVELS`; `offsets`: MIDDLE, ZEROS or MINIMUMS."""
    read_scales, read_minimums = LEVELS[scales], LEVELS[minimums]
    has_zeros, has_minimums, subtracts = offsets == ZEROS, offsets == MINIMUMS, minimums == "steps"
    one, some = dots_of_numbers
    unpack, is_packed = unpacker(bits), bits < 8
    middle = 1 << (bits - 1)

    @_summing
    def product(
        found: Any,
        inputs: Any,
        steps: Any,
        sums: Any,
        codes: Any,
        scale: Any,
        other: Any,
        first: int,
        last: int,
        own: Any,
    ) -> None:
        """found: float32 [n, rows of the weight], of which `first` to `last` are computed; inputs, steps, sums: from
        `quantise`; codes: uint8 [rows, bytes]; scale: values and units, see `LEVELS`; other: zeros or minimums, and
        units; own: this thread's numbers, uint8 [columns], levels, float32 [ROWS * chunks], scales and offsets, float32
        [groups], and sums, float32 [ROWS]."""
        numbers, levels, scales, offsets, totals = own
        columns, chunks, groups = inputs.shape[1], steps.shape[1], sums.shape[1]
        each, width = chunks // groups, columns // chunks
        for row in range(first, last):
            read_scales(scales, scale[0], scale[1], row)
            if has_minimums:
                read_minimums(offsets, other[0], other[1], row)
                if not subtracts:
                    for group in range(groups):
                        offsets[group] = -offsets[group]
            elif has_zeros:
                for group in range(groups):
                    offsets[group] = float32(other[0][row, group]) * scales[group]
            else:
                for group in range(groups):
                    offsets[group] = float32(middle) * scales[group]
            address = codes.ctypes.data + row * codes.shape[1]
            if is_packed:
                unpack(numbers.ctypes.data, address, columns)
                address = numbers.ctypes.data
            done = 0
            while done < len(inputs):
                count = ROWS if len(inputs) - done >= ROWS else 1
                for number in range(count):
                    step, level = steps[done + number], levels[number * chunks : (number + 1) * chunks]
                    if each == 1:
                        for group in range(groups):
                            level[group] = scales[group] * step[group]
                    else:
                        for group in range(groups):
                            level[group * each : (group + 1) * each] = (
                                scales[group] * step[group * each : (group + 1) * each]
                            )
                given, places = inputs[done:].ctypes.data, levels.ctypes.data
                if count == ROWS:
                    some(address, given, places, chunks, width, totals.ctypes.data)
                else:
                    one(address, given, places, chunks, width, totals.ctypes.data)
                for number in range(count):
                    sum_of, less = sums[done + number], float32(0)
                    for group in range(groups):
                        less += offsets[group] * sum_of[group]
                    found[done + number, row] = totals[number] - less
                done += count

    return product


@cache
def fp8_product() -> Any:
    """The product with E4M3 in blocks (`checkpoint/native/fp8.py`)."""
    one, some = dots_of_eights

    @_summing
    def product(found: Any, inputs: Any, codes: Any, scales: Any, first: int, last: int, own: Any) -> None:
        """found: float32 [n, rows]; inputs: float32 [n, columns]; codes: uint8 [rows, columns]; scales: float32, one
        for each block of a grid; own: levels, float32 [ROWS * grid columns], and sums, float32 [ROWS]."""
        levels, totals = own
        rows, columns = codes.shape
        height, chunks = rows // len(scales), scales.shape[1]
        for row in range(first, last):
            for number in range(ROWS):
                for chunk in range(chunks):
                    levels[number * chunks + chunk] = scales[row // height, chunk] * float32(256)
            address = codes.ctypes.data + row * columns
            done = 0
            while done < len(inputs):
                count = ROWS if len(inputs) - done >= ROWS else 1
                given, places = inputs[done:].ctypes.data, levels.ctypes.data
                if count == ROWS:
                    some(address, given, places, chunks, columns // chunks, totals.ctypes.data)
                else:
                    one(address, given, places, chunks, columns // chunks, totals.ctypes.data)
                for number in range(count):
                    found[done + number, row] = totals[number]
                done += count

    return product
