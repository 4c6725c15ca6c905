"""Vectors of LLVM that multiply rows of inputs with a part of an MXFP4 weight [in, out] (`checkpoint/native/mxfp4.py`).

A value is half an integer from -12 to 12, which one instruction looks up for 16 or 32 codes, and two rows of the weight
are multiplied at once: see `checkpoint/native/row_vectors.py`. The lookup is of x86 alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from checkpoint.native.row_vectors import (
    BYTE,
    FLOAT,
    INT,
    SHORT,
    fetch,
    floats_of_integers,
    fused,
    long,
    pointer,
    products_of_pairs,
    shuffled,
    splat,
    vector_function,
)

BLOCK = 32
"""Rows of the weight that share a row of scales."""

_DOUBLES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_SIXTEEN = 16
_SUMS = 4
_AHEAD = 128
"""Bytes of a row of the weight that are fetched before they are needed."""


@cache
def block_product(rows: int, width: int) -> Any:
    """Multiplies a block of the weight, of 2 * `width` columns, with so many rows of inputs. `width`: 16 or 32."""

    @intrinsic
    def product(
        _context: Any,
        codes: Any,
        stride: Any,
        inputs: Any,
        row_bytes: Any,
        scales: Any,
        steps: Any,
        step_bytes: Any,
        sums: Any,
    ) -> Any:
        """Addresses of: codes [BLOCK, stride], of which `width` a row are read; inputs, int16 [rows, BLOCK],
        `row_bytes` apart; scales, uint8 [2 * width]; steps, float32, one a row, `step_bytes` apart; sums, float32
        [rows, 2, width], of even and of odd columns, that are added to."""

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            _Block(builder, rows, width).generate(*arguments)
            return context.get_dummy_value()

        kinds = (types.uintp, types.intp, types.uintp, types.intp, types.uintp, types.uintp, types.intp, types.uintp)
        return types.void(*kinds), generate

    return product


@cache
def block_in_four_sums(width: int) -> Any:
    """Adds a block's products with one row of inputs to four sums for each column, of every fourth product each."""

    @intrinsic
    def add(_context: Any, codes: Any, stride: Any, inputs: Any, scales: Any, sums: Any) -> Any:
        """As in `block_product`, but inputs are float32 [BLOCK], and sums [4, 2, width]."""

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            _Block(builder, 1, width).generate_four_sums(*arguments)
            return context.get_dummy_value()

        return types.void(types.uintp, types.intp, types.uintp, types.uintp, types.uintp), generate

    return add


class _Block:
    def __init__(self, builder: Any, rows: int, width: int) -> None:
        self._builder = builder
        self._rows = rows
        self._width = width
        self._bytes = ir.VectorType(BYTE, width)

    def generate(
        self, codes: Any, stride: Any, inputs: Any, row_bytes: Any, scales: Any, steps: Any, step_bytes: Any, sums: Any
    ) -> None:
        builder, width = self._builder, self._width
        none = ir.Constant(ir.VectorType(INT, 8), [0] * 8)
        found = {
            (row, odd, part): cgutils.alloca_once_value(builder, none)
            for row in range(self._rows)
            for odd in range(2)
            for part in range(width // 8)
        }
        with cgutils.for_range(builder, long(BLOCK // 2)) as pair:
            first = builder.mul(pair.index, long(2))
            held = [self._codes(builder.add(codes, builder.mul(stride, builder.add(first, long(n))))) for n in range(2)]
            places = [builder.add(inputs, builder.mul(row_bytes, long(row))) for row in range(self._rows)]
            given = [self._pair(builder.add(place, builder.mul(first, long(2)))) for place in places]
            for odd in range(2):
                values = [self._values(one, odd) for one in held]
                for part, both in enumerate(self._interleaved(*values)):
                    for row, inputs_of_row in enumerate(given):
                        place = found[row, odd, part]
                        added = products_of_pairs(builder, both, inputs_of_row)
                        builder.store(builder.add(builder.load(place), added), place)
        for (row, odd, part), place in found.items():
            step = builder.load(pointer(builder, builder.add(steps, builder.mul(step_bytes, long(row))), FLOAT))
            at = builder.add(sums, long(4 * ((row * 2 + odd) * width + 8 * part)))
            target = pointer(builder, at, ir.VectorType(FLOAT, 8))
            value = floats_of_integers(builder, builder.load(place))
            level = builder.fmul(self._factor(scales, odd, part), splat(builder, step, 8))
            builder.store(fused(builder, value, level, builder.load(target, align=4)), target, align=4)

    def generate_four_sums(self, codes: Any, stride: Any, inputs: Any, scales: Any, sums: Any) -> None:
        """A product of an input in bfloat16 and a value is exact in float32: it is rounded once, when it is added."""
        builder, width = self._builder, self._width
        floats = ir.VectorType(FLOAT, 8)
        places = [(odd, part) for odd in range(2) for part in range(width // 8)]
        factors = [self._factor(scales, odd, part) for odd, part in places]
        with cgutils.for_range(builder, long(_SUMS)) as one:
            at = builder.add(sums, builder.mul(one.index, long(8 * width)))
            own = [pointer(builder, builder.add(at, long(32 * number)), floats) for number in range(len(places))]
            totals = [cgutils.alloca_once(builder, floats) for _ in places]
            for total, target in zip(totals, own, strict=True):
                builder.store(builder.load(target, align=4), total)
            with cgutils.for_range(builder, long(BLOCK // _SUMS)) as step:
                row = builder.add(builder.mul(step.index, long(_SUMS)), one.index)
                held = self._codes(builder.add(codes, builder.mul(stride, row)))
                given = builder.load(pointer(builder, builder.add(inputs, builder.mul(row, long(4))), FLOAT), align=4)
                doubles = [self._values(held, odd) for odd in range(2)]
                for (odd, part), factor, total in zip(places, factors, totals, strict=True):
                    some = shuffled(builder, doubles[odd], doubles[odd], list(range(8 * part, 8 * part + 8)))
                    value = builder.fmul(builder.sitofp(some, floats), factor)
                    builder.store(fused(builder, value, splat(builder, given, 8), builder.load(total)), total)
            for total, target in zip(totals, own, strict=True):
                builder.store(builder.load(total), target, align=4)

    def _codes(self, address: Any) -> Any:
        builder = self._builder
        fetch(builder, builder.add(address, long(_AHEAD)))
        return builder.load(pointer(builder, address, self._bytes), align=1)

    def _values(self, codes: Any, odd: int) -> Any:
        """Twice the values of even or odd columns."""
        builder, width = self._builder, self._width
        table = ir.Constant(self._bytes, [*_DOUBLES] * (width // _SIXTEEN))
        if odd:
            codes = builder.lshr(codes, ir.Constant(self._bytes, [4] * width))
        codes = builder.and_(codes, ir.Constant(self._bytes, [15] * width))
        name = "llvm.x86.ssse3.pshuf.b.128" if width == _SIXTEEN else "llvm.x86.avx2.pshuf.b"
        return builder.call(vector_function(builder, name, self._bytes, [self._bytes] * 2), [table, codes])

    def _interleaved(self, one: Any, other: Any) -> list[Any]:
        """Pairs of both rows' values, int16: 8 columns at a time."""
        builder, found = self._builder, []
        for part in range(self._width // 8):
            places = [place + row * self._width for place in range(8 * part, 8 * part + 8) for row in range(2)]
            found.append(builder.sext(shuffled(builder, one, other, places), ir.VectorType(SHORT, 16)))
        return found

    def _pair(self, address: Any) -> Any:
        builder = self._builder
        both = builder.load(pointer(builder, address, INT), align=2)
        return builder.bitcast(splat(builder, both, 8), ir.VectorType(SHORT, 16))

    def _factor(self, scales: Any, odd: int, part: int) -> Any:
        """2^(scale - 127) / 2: a scale is the exponent of a float32. The half is of `_DOUBLES`."""
        builder, wide = self._builder, ir.VectorType(INT, 8)
        held = builder.load(pointer(builder, builder.add(scales, long(16 * part)), ir.VectorType(BYTE, 16)), align=1)
        some = builder.zext(shuffled(builder, held, held, list(range(odd, 16, 2))), wide)
        factor = builder.bitcast(builder.shl(some, ir.Constant(wide, [23] * 8)), ir.VectorType(FLOAT, 8))
        return builder.fmul(factor, ir.Constant(ir.VectorType(FLOAT, 8), [0.5] * 8))
