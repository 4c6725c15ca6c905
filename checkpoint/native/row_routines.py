"""Compiled products of a few rows with an encoded weight that is not restored; see `checkpoint/native/row_vectors.py`.

A value of a weight is level * number - offset, where levels and offsets are those of a group of columns. So a product
is a sum over groups: level * (numbers times inputs) - offset * (sum of inputs).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import float32, int8, int16, uint32

from checkpoint.native.packed_vectors import dots_of_packed
from checkpoint.native.routines import _float_of_bits, _float_of_half, compiled
from checkpoint.native.row_vectors import ROWS, dots_of_eights, dots_of_numbers, unpacker

MOST = 127 * 256 + 127
"""The largest size of an input as an integer: both its bytes are signed, see `packed_vectors`."""


@compiled
def _same(value: Any) -> Any:
    return float32(value)


@compiled
def _float_of_bfloat(bits: Any) -> Any:
    return _float_of_bits(uint32(bits) << 16)


FLOATS: dict[str, Any] = {"float32": _same, "bfloat16": _float_of_bfloat, "float16": _float_of_half}
"""By dtype: how its bits, as numpy has them, become a float32."""


def _quantiser(converted: Any, put: Any) -> Any:
    @compiled
    def quantise(rows: Any, found: Any, levels: Any, sums: Any) -> None:
        """rows: [n, columns]; found: see `_put_short`; levels: float32 [n, chunks], one step of a chunk's integers;
        sums: float32 [n, groups], of the inputs. A chunk with NaN or infinity has NaN as its level."""
        columns, chunks, groups = rows.shape[1], levels.shape[1], sums.shape[1]
        width, wide = columns // chunks, columns // groups
        for row in range(len(rows)):
            for chunk in range(chunks):
                given = rows[row, chunk * width :][:width]
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
                    put(found, row, chunk * width + column, columns, int16(np.rint(value)))
            for group in range(groups):
                total = float32(0)
                for column in range(group * wide, (group + 1) * wide):
                    total += converted(rows[row, column])
                sums[row, group] = total

    return quantise


@compiled
def _put_short(found: Any, row: int, column: int, columns: int, value: Any) -> None:
    """found: int16 [n, columns]."""
    found[row, column] = value


@compiled
def _put_bytes(found: Any, row: int, column: int, columns: int, value: Any) -> None:
    """found: int8 [n, 2 * columns], a plane of high bytes and one of low bytes, both signed."""
    low = int8(value)
    found[row, column] = int8((value - low) >> 8)
    found[row, columns + column] = low


@cache
def quantiser(dtype: str, in_planes: bool) -> Any:
    """Of rows of this dtype; those of 16 bits are given as uint16. `in_planes`: see `packed_vectors.has_planes`."""
    return _quantiser(FLOATS[dtype], _put_bytes if in_planes else _put_short)


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


@cache
def _multiply(dots: Any, input_bytes: int) -> Any:
    """Multiplies rows of inputs with one row of a weight, `ROWS` at a time."""
    one, some = dots[:2]

    @compiled
    def multiply(count: int, numbers: int, given: Any, levels: Any, sizes: Any, found: int) -> None:
        """Addresses, see `row_vectors`: `given` of inputs, steps and sums, `levels` of scales and offsets."""
        inputs, steps, sums = given
        groups, each, width, apart = sizes
        done = 0
        while done < count:
            if count - done >= ROWS:
                some(numbers, (inputs, steps, sums), levels, sizes, found)
                rows = ROWS
            else:
                one(numbers, (inputs, steps, sums), levels, sizes, found)
                rows = 1
            inputs += rows * groups * each * width * input_bytes
            steps += rows * groups * each * 4
            sums += rows * groups * 4
            found += rows * apart
            done += rows

    return multiply


@cache
def integer_product(bits: int, scales: str, offsets: str, minimums: str, width: int = 0) -> Any:
    """The product with integers of so many bits (`checkpoint/native/integers.py`), whose scales, and minimums if there
    are any, are of these kinds, see `LEVELS`; `offsets`: MIDDLE, ZEROS or MINIMUMS. `width`: columns of a group, where
    packed rows are multiplied as they are, see `packed_vectors.is_packed`."""
    read_scales, make_offsets = LEVELS[scales], _offsets(bits, offsets, minimums)
    dots = dots_of_packed(bits, width) if width else dots_of_numbers
    multiply, alone, has_alone = _multiply(dots, 2), dots[-1], width > 0
    unpack, unpacks = unpacker(bits), bits < 8 and not width

    @compiled
    def product(found: Any, given: Any, codes: Any, scale: Any, other: Any, first: int, last: int, own: Any) -> None:
        """found: float32 [n, rows of the weight], of which `first` to `last` are computed; given: inputs, steps and
        sums from `quantise`; codes: uint8 [rows, bytes]; scale: values and units, see `LEVELS`; other: zeros or
        minimums, and units; own: this thread's numbers, uint8 [columns], and scales and offsets, float32
        [WEIGHT_ROWS * groups]."""
        numbers, scales, offsets = own
        inputs, steps, sums = given
        columns, chunks, groups = inputs.shape[1], steps.shape[1], sums.shape[1]
        places = inputs.ctypes.data, steps.ctypes.data, sums.ctypes.data
        sizes = groups, chunks // groups, columns // chunks, found.shape[1] * 4
        unpacked, packed, target = numbers.ctypes.data, codes.ctypes.data, found.ctypes.data
        for begin in range(first, last, WEIGHT_ROWS):
            count = min(WEIGHT_ROWS, last - begin)
            read_scales(scales[: count * groups], scale[0], scale[1], begin, groups)
            make_offsets(offsets[: count * groups], scales, other, begin, groups)
            levels = scales.ctypes.data, offsets.ctypes.data
            is_alone = has_alone and len(inputs) == 1
            if is_alone:
                for row in range(count):
                    for group in range(groups):
                        scales[row * groups + group] *= steps[0, group]
            for row in range(count):
                address = packed + (begin + row) * codes.shape[1]
                if unpacks:
                    unpack(unpacked, address, columns)
                    address = unpacked
                theirs = levels[0] + row * groups * 4, levels[1] + row * groups * 4
                place = target + (begin + row) * 4
                if is_alone:
                    alone(address, places, theirs, sizes, place)
                else:
                    multiply(len(inputs), address, places, theirs, sizes, place)

    return product


@cache
def fp8_product() -> Any:
    """The product with E4M3 in blocks (`checkpoint/native/fp8.py`)."""
    multiply = _multiply(dots_of_eights, 4)

    @compiled
    def product(found: Any, inputs: Any, codes: Any, scales: Any, first: int, last: int, own: Any) -> None:
        """found: float32 [n, rows]; inputs: float32 [n, columns]; codes: uint8 [rows, columns]; scales: float32, one
        for each block of a grid; own: float32 [grid columns]."""
        rows, columns = codes.shape
        height, groups = rows // len(scales), scales.shape[1]
        sizes = groups, 1, columns // groups, found.shape[1] * 4
        place, packed, target = inputs.ctypes.data, codes.ctypes.data, found.ctypes.data
        levels = own.ctypes.data, own.ctypes.data
        for row in range(first, last):
            for group in range(groups):
                own[group] = scales[row // height, group] * float32(256)
            multiply(len(inputs), packed + row * columns, (place, place, place), levels, sizes, target + row * 4)

    return product
