"""Vectors of LLVM that multiply the numbers of one row of a weight with some rows of inputs.

numba compiles them for this CPU, whatever its vectors are.

Inputs are integers of 16 bits, with a scale for each chunk of columns (`row_routines.quantise`): two products and their
sum are then one instruction with AVX2 and AVX-512, twice as fast as in float32. Sums of a chunk are exact in 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
"""Numbers at a time. A chunk has a multiple of them."""

FLOAT, BYTE, HALF = ir.FloatType(), ir.IntType(8), ir.HalfType()
SHORT, INT, LONG = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_BYTES = 32
"""That are unpacked at a time."""


def long(number: int) -> Any:
    return ir.Constant(LONG, number)


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def splat(builder: Any, value: Any, lanes: int) -> Any:
    vector = ir.VectorType(value.type, lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(INT, 0))
    places = ir.Constant(ir.VectorType(INT, lanes), [0] * lanes)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), places)


def vector_function(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    found = builder.module.globals.get(name)
    return found or ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def fused(builder: Any, one: Any, other: Any, added: Any) -> Any:
    kind = one.type
    return builder.call(vector_function(builder, f"llvm.fma.v{kind.count}f32", kind, [kind] * 3), [one, other, added])


def shuffled(builder: Any, one: Any, other: Any, places: list[int]) -> Any:
    """Elements of two vectors, by their places in both together."""
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(INT, len(places)), places))


def products_of_pairs(builder: Any, one: Any, other: Any) -> Any:
    """The sums of two neighbouring products each, int32, of vectors of int16. LLVM finds the instruction (PMADDWD)."""
    count = one.type.count
    wide = ir.VectorType(INT, count)
    products = builder.mul(builder.sext(one, wide), builder.sext(other, wide))
    even, odd = (shuffled(builder, products, products, list(range(first, count, 2))) for first in (0, 1))
    return builder.add(even, odd)


def floats_of_integers(builder: Any, vector: Any) -> Any:
    return builder.sitofp(vector, ir.VectorType(FLOAT, vector.type.count))


def _sum_of_lanes(builder: Any, vector: Any) -> Any:
    name = f"llvm.vector.reduce.fadd.v{vector.type.count}f32"
    add = vector_function(builder, name, FLOAT, [FLOAT, vector.type])
    return builder.call(add, [ir.Constant(FLOAT, -0.0), vector], fastmath=("reassoc",))


class _Integers:
    """Numbers of 8 bits, with or without a sign, times inputs of 16 bits."""

    sums = ir.VectorType(INT, LANES // 2)
    input_bytes = 2

    def __init__(self, is_signed: bool) -> None:
        self._is_signed = is_signed

    def numbers(self, builder: Any, address: Any) -> Any:
        wide = ir.VectorType(SHORT, LANES)
        held = builder.load(pointer(builder, address, ir.VectorType(BYTE, LANES)), align=1)
        return builder.sext(held, wide) if self._is_signed else builder.zext(held, wide)

    def inputs(self, builder: Any, address: Any) -> Any:
        return builder.load(pointer(builder, address, ir.VectorType(SHORT, LANES)), align=2)

    def added(self, builder: Any, numbers: Any, inputs: Any, sums: Any) -> Any:
        return builder.add(products_of_pairs(builder, numbers, inputs), sums)

    def floats(self, builder: Any, sums: Any) -> Any:
        return floats_of_integers(builder, sums)


class _Eights:
    """Numbers of 8 bits that are floats, E4M3, times inputs in float32. Shifted to the places of a float16, a number is
    256 times too small (`checkpoint/native/fp8.py`)."""

    sums = ir.VectorType(FLOAT, LANES)
    input_bytes = 4

    def numbers(self, builder: Any, address: Any) -> Any:
        wide = ir.VectorType(SHORT, LANES)
        held = builder.sext(builder.load(pointer(builder, address, ir.VectorType(BYTE, LANES)), align=1), wide)
        shifted = builder.shl(held, ir.Constant(wide, [7] * LANES))  # the sign is copied to bits 14 and 15
        kept = builder.and_(shifted, ir.Constant(wide, [0xBFFF] * LANES))
        return builder.fpext(builder.bitcast(kept, ir.VectorType(HALF, LANES)), self.sums)

    def inputs(self, builder: Any, address: Any) -> Any:
        return builder.load(pointer(builder, address, self.sums), align=4)

    def added(self, builder: Any, numbers: Any, inputs: Any, sums: Any) -> Any:
        return fused(builder, numbers, inputs, sums)

    def floats(self, builder: Any, sums: Any) -> Any:
        return sums


def _dot(kind: Any, rows: int) -> Callable[..., None]:
    @intrinsic
    def dot(_context: Any, numbers: Any, inputs: Any, levels: Any, chunks: Any, width: Any, found: Any) -> Any:
        """Addresses of: numbers, a byte each [chunks * width]; inputs [rows, chunks * width]; levels, float32
        [rows, chunks]; found, float32 [rows], the sums over chunks of a level times its chunk's sum."""

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            _generate_dot(builder, kind, rows, arguments)
            return context.get_dummy_value()

        return types.void(*[types.uintp] * 3, types.intp, types.intp, types.uintp), generate

    return dot


def _generate_dot(builder: Any, kind: Any, rows: int, arguments: Any) -> None:
    numbers, inputs, levels, chunks, width, found = arguments
    none = ir.Constant(kind.sums, [0] * kind.sums.count)
    floats = ir.VectorType(FLOAT, kind.sums.count)
    totals = [cgutils.alloca_once_value(builder, ir.Constant(floats, [0.0] * floats.count)) for _ in range(rows)]
    sums = [cgutils.alloca_once(builder, kind.sums) for _ in range(rows)]
    columns = builder.mul(chunks, width)
    with cgutils.for_range(builder, chunks) as chunk:
        for one in sums:
            builder.store(none, one)
        start = builder.mul(chunk.index, width)
        with cgutils.for_range(builder, builder.udiv(width, long(LANES))) as step:
            at = builder.add(start, builder.mul(step.index, long(LANES)))
            values = kind.numbers(builder, builder.add(numbers, at))
            for row, one in enumerate(sums):
                place = builder.mul(builder.add(builder.mul(columns, long(row)), at), long(kind.input_bytes))
                given = kind.inputs(builder, builder.add(inputs, place))
                builder.store(kind.added(builder, values, given, builder.load(one)), one)
        for row, (one, total) in enumerate(zip(sums, totals, strict=True)):
            place = builder.mul(builder.add(builder.mul(chunks, long(row)), chunk.index), long(4))
            level = builder.load(pointer(builder, builder.add(levels, place), FLOAT))
            value = kind.floats(builder, builder.load(one))
            added = fused(builder, value, splat(builder, level, floats.count), builder.load(total))
            builder.store(added, total)
    for row, total in enumerate(totals):
        target = pointer(builder, builder.add(found, long(4 * row)), FLOAT)
        builder.store(_sum_of_lanes(builder, builder.load(total)), target)


ROWS = 4
"""Rows of inputs that are multiplied at once, or one."""

dots_of_numbers = _dot(_Integers(is_signed=False), 1), _dot(_Integers(is_signed=False), ROWS)
dots_of_signed = _dot(_Integers(is_signed=True), 1), _dot(_Integers(is_signed=True), ROWS)
dots_of_eights = _dot(_Eights(), 1), _dot(_Eights(), ROWS)


@cache
def unpacker(bits: int) -> Any:
    """Unpacks a row of numbers of so many bits, see `checkpoint.native.integers.packed_rows`. Shifts are constants, for
    AVX2 shifts bytes by nothing else in few instructions."""

    @intrinsic
    def unpack(_context: Any, target: Any, packed: Any, columns: Any) -> Any:
        """Addresses of numbers, uint8 [columns], and of a packed row."""

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            target, packed, columns = arguments
            low = 0
            for width in (8, 4, 2, 1):
                if bits & width:
                    count = builder.udiv(builder.mul(columns, long(width)), long(8))
                    _unpack_plane(builder, target, packed, count, width, low)
                    packed, low = builder.add(packed, count), low + width
            return context.get_dummy_value()

        return types.void(types.uintp, types.uintp, types.intp), generate

    return unpack


def _unpack_plane(builder: Any, target: Any, packed: Any, count: Any, width: int, low: int) -> None:
    """The bits of one width, which are in `count` bytes, to their places from `low` on."""
    vectors = builder.udiv(count, long(_BYTES))
    done = builder.mul(vectors, long(_BYTES))

    def unpack(first: Any, lanes: int) -> None:
        kind = ir.VectorType(BYTE, lanes)
        held = builder.load(pointer(builder, builder.add(packed, first), kind), align=1)
        for place in range(8 // width):
            at = pointer(builder, builder.add(target, builder.add(builder.mul(count, long(place)), first)), kind)
            value = builder.lshr(held, ir.Constant(kind, [width * place] * lanes)) if place else held
            value = builder.and_(value, ir.Constant(kind, [(1 << width) - 1] * lanes))
            if low:
                value = builder.or_(builder.load(at, align=1), builder.shl(value, ir.Constant(kind, [low] * lanes)))
            builder.store(value, at, align=1)

    with cgutils.for_range(builder, vectors) as step:
        unpack(builder.mul(step.index, long(_BYTES)), _BYTES)
    with cgutils.for_range(builder, builder.sub(count, done)) as rest:
        unpack(builder.add(done, rest.index), 1)
