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
    def levels(target: Any, values: Any, units: Any, first: int, groups: int) -> None:
        """target: float32 [rows * groups], of rows of the weight from `first` on; values: of all; units: nothing."""
        some = values[first * groups : first * groups + len(target)]
        for place in range(len(target)):
            target[place] = converted(some[place])

    return levels


@compiled
def _levels_in_steps(target: Any, values: Any, units: Any, first: int, groups: int) -> None:
    """`values` are integers, multiples of `units`: float16 as uint16 [rows, some groups]."""
    each = groups // units.shape[1]
    some = values[first * groups : first * groups + len(target)]
    for row in range(len(target) // groups):
        for few in range(units.shape[1]):
            unit, start = _float_of_half(units[first + row, few]), row * groups + few * each
            own, steps = target[start : start + each], some[start : start + each]
            for group in range(each):
                own[group] = float32(steps[group]) * unit


LEVELS: dict[str, Any] = {name: _plain_levels(one) for name, one in FLOATS.items()} | {"steps": _levels_in_steps}

MIDDLE, ZEROS, MINIMUMS = "middle", "zeros", "minimums"
"""What offsets are made of: half of what the bits can hold, zeros, or minimums."""

WEIGHT_ROWS = 16
"""Rows of a weight whose levels are made together: of one row they are too few for vectors."""


@cache
def _offsets(bits: int, kind: str, minimums: str) -> Any:
    """Makes the offsets of some rows of a weight."""
    read_minimums, subtracts = LEVELS[minimums], minimums == "steps"
    has_zeros, has_minimums = kind == ZEROS, kind == MINIMUMS
    middle = 1 << (bits - 1)

    @compiled
    def offsets(target: Any, scales: Any, other: Any, first: int, groups: int) -> None:
        """target: float32 [rows * groups]; scales: of the same rows; other: zeros or minimums, and units."""
        if has_minimums:
            read_minimums(target, other[0], other[1], first, groups)
            if not subtracts:
                for place in range(len(target)):
                    target[place] = -target[place]
        elif has_zeros:
            zeros = other[0][first * groups : first * groups + len(target)]
            for place in range(len(target)):
                target[place] = float32(zeros[place]) * scales[place]
        else:
            for place in range(len(target)):
                target[place] = float32(middle) * scales[place]

    return offsets


@compiled
def _spread_levels(target: Any, scales: Any, steps: Any) -> None:
    """Each chunk's scale times its step. target and steps: float32 [chunks]; scales: float32 [groups]."""
    each = len(target) // len(scales)
    if each == 1:
        for group in range(len(scales)):
            target[group] = scales[group] * steps[group]
    else:
        for group in range(len(scales)):
            for chunk in range(group * each, (group + 1) * each):
                target[chunk] = scales[group] * steps[chunk]


@partial(compiled, reassociates=True)
def _sum_of_products(one: Any, other: Any) -> Any:
    total = float32(0)
    for place in range(len(one)):
        total += one[place] * other[place]
    return total


@cache
def integer_product(bits: int, scales: str, offsets: str, minimums: str) -> Any:
    """The product with integers of so many bits (`checkpoint/native/integers.py`), whose scales, and minimums if there
    are any, are of these kinds, see `LEVELS`; `offsets`: MIDDLE, ZEROS or MINIMUMS."""
    read_scales, make_offsets = LEVELS[scales], _offsets(bits, offsets, minimums)
    one, some = dots_of_numbers
    unpack, is_packed = unpacker(bits), bits < 8

    @compiled
    def multiply_row(found: Any, given: Any, address: Any, scale: Any, offset: Any, levels: Any, totals: Any) -> None:
        """found: float32 [n], with one row of the weight, whose numbers are at `address`; given: see `product`; scale
        and offset: float32 [groups]."""
        inputs, steps, sums = given
        columns, chunks = inputs.shape[1], steps.shape[1]
        done = 0
        while done < len(inputs):
            count = ROWS if len(inputs) - done >= ROWS else 1
            for number in range(count):
                _spread_levels(levels[number * chunks : (number + 1) * chunks], scale, steps[done + number])
            rows, places, target = inputs[done:].ctypes.data, levels.ctypes.data, totals.ctypes.data
            if count == ROWS:
                some(address, rows, places, chunks, columns // chunks, target)
            else:
                one(address, rows, places, chunks, columns // chunks, target)
            for number in range(count):
                found[done + number] = totals[number] - _sum_of_products(offset, sums[done + number])
            done += count

    @compiled
    def product(found: Any, given: Any, codes: Any, scale: Any, other: Any, first: int, last: int, own: Any) -> None:
        """found: float32 [n, rows of the weight], of which `first` to `last` are computed; given: inputs, steps and
        sums from `quantise`; codes: uint8 [rows, bytes]; scale: values and units, see `LEVELS`; other: zeros or
        minimums, and units; own: this thread's numbers, uint8 [columns], levels, float32 [ROWS * chunks], scales and
        offsets, float32 [WEIGHT_ROWS * groups], and sums, float32 [ROWS]."""
        numbers, levels, scales, offsets, totals = own
        columns, groups = given[0].shape[1], given[2].shape[1]
        for begin in range(first, last, WEIGHT_ROWS):
            count = min(WEIGHT_ROWS, last - begin)
            read_scales(scales[: count * groups], scale[0], scale[1], begin, groups)
            make_offsets(offsets[: count * groups], scales, other, begin, groups)
            for row in range(count):
                address = codes.ctypes.data + (begin + row) * codes.shape[1]
                if is_packed:
                    unpack(numbers.ctypes.data, address, columns)
                    address = numbers.ctypes.data
                theirs = slice(row * groups, (row + 1) * groups)
                multiply_row(found[:, begin + row], given, address, scales[theirs], offsets[theirs], levels, totals)

    return product


@cache
def fp8_product() -> Any:
    """The product with E4M3 in blocks (`checkpoint/native/fp8.py`)."""
    one, some = dots_of_eights

    @compiled
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
