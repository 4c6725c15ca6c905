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
_AHEAD = 4096
"""Bytes of codes that are fetched before they are unpacked."""


def long(number: int) -> Any:
    return ir.Constant(LONG, number)


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def fetch(builder: Any, address: Any) -> None:
    """Begin to bring a line of memory into the second cache. Any address will do, even one that is nothing's. The first
    cache has few places for lines that are on their way, which lets less of them come."""
    kinds = [BYTE.as_pointer(), INT, INT, INT]
    prefetch = vector_function(builder, "llvm.prefetch.p0", ir.VoidType(), kinds)
    builder.call(prefetch, [pointer(builder, address, BYTE), *(ir.Constant(INT, number) for number in (0, 2, 1))])


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


def sum_of_lanes(builder: Any, vector: Any) -> Any:
    name = f"llvm.vector.reduce.fadd.v{vector.type.count}f32"
    add = vector_function(builder, name, FLOAT, [FLOAT, vector.type])
    return builder.call(add, [ir.Constant(FLOAT, -0.0), vector], fastmath=("reassoc",))


class _Integers:
    """Numbers of 8 bits, times inputs of 16 bits."""

    sums = ir.VectorType(INT, LANES // 2)
    input_bytes = 2
    has_steps = True

    def numbers(self, builder: Any, address: Any) -> Any:
        wide = ir.VectorType(SHORT, LANES)
        held = builder.load(pointer(builder, address, ir.VectorType(BYTE, LANES)), align=1)
        return builder.zext(held, wide)

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
    has_steps = False

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
    def dot(_context: Any, numbers: Any, given: Any, levels: Any, sizes: Any, found: Any) -> Any:
        """Some rows of inputs with one row of a weight. Addresses of: numbers, a byte each [columns]; given: inputs
        [rows, columns], steps, float32 [rows, chunks], and sums, float32 [rows, groups]; levels: scales and offsets,
        float32 [groups]; found, float32 [rows]. sizes: groups, chunks of a group, columns of a chunk, and how many
        bytes apart what is found is.

        Without steps and offsets where the inputs are float32.
        """

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            _Dot(builder, kind, rows, arguments).generate()
            return context.get_dummy_value()

        places, pair, four = (types.UniTuple(types.intp, count) for count in (3, 2, 4))
        return types.void(types.intp, places, pair, four, types.intp), generate

    return dot


class _Dot:
    """Generates one. Everything is an address here: numba counts references to arrays, which takes as long as a row."""

    def __init__(self, builder: Any, kind: Any, rows: int, arguments: Any) -> None:
        self._builder = builder
        self._kind = kind
        self._rows = range(rows)
        self._numbers, given, levels, sizes, self._found = arguments
        self._inputs, self._steps, self._sums = (builder.extract_value(given, n) for n in range(3))
        self._scales, self._offsets = (builder.extract_value(levels, n) for n in range(2))
        self._groups, self._each, self._width, self._apart = (builder.extract_value(sizes, n) for n in range(4))
        self._chunks = builder.mul(self._groups, self._each)
        self._columns = builder.mul(self._chunks, self._width)
        self._floats = ir.VectorType(FLOAT, kind.sums.count)
        zeros = ir.Constant(self._floats, [0.0] * self._floats.count)
        self._totals = [cgutils.alloca_once_value(builder, zeros) for _ in self._rows]
        self._less = [cgutils.alloca_once_value(builder, ir.Constant(FLOAT, 0.0)) for _ in self._rows]
        self._of_chunk = [cgutils.alloca_once(builder, kind.sums) for _ in self._rows]

    def generate(self) -> None:
        builder = self._builder
        with cgutils.for_range(builder, self._groups) as group:
            scale = self._float(self._scales, group.index)
            with cgutils.for_range(builder, self._each) as number:
                chunk = builder.add(builder.mul(group.index, self._each), number.index)
                self._add_chunk(chunk)
                for row in self._rows:
                    self._add_level(row, self._level(row, chunk, scale))
            if self._kind.has_steps:
                self._subtract_offset(group.index)
        for row, (total, less) in enumerate(zip(self._totals, self._less, strict=True)):
            place = builder.add(self._found, builder.mul(self._apart, long(row)))
            value = builder.fsub(sum_of_lanes(builder, builder.load(total)), builder.load(less))
            builder.store(value, pointer(builder, place, FLOAT))

    def _add_chunk(self, chunk: Any) -> None:
        """The sums of the inputs' products with a chunk of the numbers."""
        builder, kind = self._builder, self._kind
        none = ir.Constant(kind.sums, [0] * kind.sums.count)
        for one in self._of_chunk:
            builder.store(none, one)
        start = builder.mul(chunk, self._width)
        with cgutils.for_range(builder, builder.udiv(self._width, long(LANES))) as step:
            at = builder.add(start, builder.mul(step.index, long(LANES)))
            values = kind.numbers(builder, builder.add(self._numbers, at))
            for row, one in enumerate(self._of_chunk):
                place = builder.add(builder.mul(self._columns, long(row)), at)
                given = kind.inputs(builder, builder.add(self._inputs, builder.mul(place, long(kind.input_bytes))))
                builder.store(kind.added(builder, values, given, builder.load(one)), one)

    def _level(self, row: int, chunk: Any, scale: Any) -> Any:
        if not self._kind.has_steps:
            return scale
        place = self._builder.add(self._builder.mul(self._chunks, long(row)), chunk)
        return self._builder.fmul(scale, self._float(self._steps, place))

    def _add_level(self, row: int, level: Any) -> None:
        builder, total = self._builder, self._totals[row]
        value = self._kind.floats(builder, builder.load(self._of_chunk[row]))
        builder.store(fused(builder, value, splat(builder, level, self._floats.count), builder.load(total)), total)

    def _subtract_offset(self, group: Any) -> None:
        builder, offset = self._builder, self._float(self._offsets, group)
        for row, less in enumerate(self._less):
            place = builder.add(builder.mul(self._groups, long(row)), group)
            product = builder.fmul(offset, self._float(self._sums, place))
            builder.store(builder.fadd(builder.load(less), product), less)

    def _float(self, address: Any, place: Any) -> Any:
        builder = self._builder
        return builder.load(pointer(builder, builder.add(address, builder.mul(place, long(4))), FLOAT))


ROWS = 4
"""Rows of inputs that are multiplied at once, or one."""

dots_of_numbers = _dot(_Integers(), 1), _dot(_Integers(), ROWS)
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
        first = builder.mul(step.index, long(_BYTES))
        fetch(builder, builder.add(builder.add(packed, first), long(_AHEAD)))
        unpack(first, _BYTES)
    with cgutils.for_range(builder, builder.sub(count, done)) as rest:
        unpack(builder.add(done, rest.index), 1)
