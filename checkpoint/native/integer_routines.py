"""Compiled routines that restore rows of integers with group scales (`checkpoint/native/integers.py`) in one pass.

See `checkpoint/native/routines.py` for why and how they are compiled.
"""

from __future__ import annotations

from typing import Any

from numba import float32, uint8, uint16, uint32

from checkpoint.native.routines import _bits_of_float, _float_of_bits, _rounded, _unchanged, compiled

EXACT, TO_HALF, TO_BFLOAT = 0, 1, 2
"""How products are rounded before they become weights."""

_LARGEST_HALF = 65520.0
"""The least float32 that is infinite in float16."""


@compiled
def _half_bits(value: Any) -> Any:
    """The bits of a float32 in float16: to the nearest, ties to even. Not for NaN.

    The least normal one is 2^-14. Below, numbers are multiples of 2^-24: so many has the mantissa of the sum with 0.5.
    """
    bits = _bits_of_float(value)
    size = uint32(bits & 0x7FFFFFFF)
    normal = uint32(uint32(size + 0xFFF + ((size >> 13) & 1)) >> 13) - uint32(112 << 10)
    subnormal = _bits_of_float(float32(_float_of_bits(size) + float32(0.5))) - uint32(0x3F000000)
    found = subnormal if size < uint32(113 << 23) else normal
    found = uint32(0x7C00) if _float_of_bits(size) >= float32(_LARGEST_HALF) else found
    return uint16(found | uint32((bits >> 16) & 0x8000))


@compiled
def _as_half(value: Any) -> Any:
    """A float32, rounded to float16 as `_half_bits` does."""
    bits = _bits_of_float(value)
    size = uint32(bits & 0x7FFFFFFF)
    normal = uint32(uint32(size + 0xFFF + ((size >> 13) & 1)) & 0xFFFFE000)
    subnormal = _bits_of_float(float32(float32(_float_of_bits(size) + float32(0.5)) - float32(0.5)))
    found = subnormal if size < uint32(113 << 23) else normal
    found = uint32(0x7F800000) if _float_of_bits(size) >= float32(_LARGEST_HALF) else found
    return _float_of_bits(uint32(found | uint32(bits & 0x80000000)))


@compiled
def _as_bfloat(value: Any) -> Any:
    return _float_of_bits(uint32(_rounded(value)) << 16)


@compiled
def _unpack(numbers: Any, code: Any, bits: int) -> None:
    """The numbers of a packed row, see `packed_rows`."""
    columns, start, low = len(numbers), 0, uint8(0)
    for width in (8, 4, 2, 1):
        if bits & width:
            count = columns * width // 8
            mask = uint8((1 << width) - 1)
            for place in range(8 // width):
                run, packed = numbers[place * count : (place + 1) * count], code[start : start + count]
                shift = uint8(width * place)
                if low:
                    for column in range(count):
                        run[column] |= uint8(uint8(uint8(packed[column] >> shift) & mask) << low)
                else:
                    for column in range(count):
                        run[column] = uint8(uint8(packed[column] >> shift) & mask)
            start, low = start + count, uint8(low + width)


@compiled
def _spread(found: Any, level: Any, order: Any) -> None:
    """Each group's scale, zero or minimum at its columns.

    An order may be from a damaged file, and no bounds are checked elsewhere.
    """
    groups, columns = len(level), len(found)
    if len(order):
        for column in range(columns):
            found[column] = level[min(max(order[column], 0), groups - 1)]
        return
    width = columns // groups
    for group in range(groups):
        found[group * width : (group + 1) * width] = level[group]


def _restorer(converted: Any) -> Any:
    """Of weights whose values are `converted` from float32."""

    @compiled
    def restore(
        target: Any, codes: Any, scales: Any, zeros: Any, minimums: Any, order: Any, row_scratch: Any, rounding: int
    ) -> None:
        """target: [rows, columns]; codes: uint8 [rows, bytes]; scales, and zeros and minimums where they are not empty:
        float32 [rows, groups]; order: int16 [columns], or empty. `row_scratch`: two float32 and a uint8 a column.
        """
        values, offsets, numbers = row_scratch
        columns = len(numbers)
        bits = 8 * codes.shape[1] // columns
        offsets[:] = float32(0 if len(minimums) else 1 << (bits - 1))
        for row in range(len(target)):
            found = target[row]
            _unpack(numbers, codes[row], bits)
            _spread(values, scales[row], order)
            if len(zeros):
                _spread(offsets, zeros[row], order)
            if rounding == EXACT and not len(minimums):
                for column in range(columns):
                    found[column] = converted(float32(float32(numbers[column]) - offsets[column]) * values[column])
                continue
            if len(minimums):
                _spread(offsets, minimums[row], order)
                for column in range(columns):
                    values[column] = float32(float32(numbers[column]) * values[column]) + offsets[column]
            else:
                for column in range(columns):
                    values[column] = float32(float32(numbers[column]) - offsets[column]) * values[column]
            if rounding == TO_HALF:
                for column in range(columns):
                    values[column] = _as_half(values[column])
            elif rounding == TO_BFLOAT:
                for column in range(columns):
                    values[column] = _as_bfloat(values[column])
            for column in range(columns):
                found[column] = converted(values[column])

    return restore


integers_in_bfloat16 = _restorer(_rounded)
integers_in_float16 = _restorer(_half_bits)
integers_in_float32 = _restorer(_unchanged)
