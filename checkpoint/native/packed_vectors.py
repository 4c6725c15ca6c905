"""Vectors of LLVM that multiply packed rows of a weight, of 4 or 8 bits, with some rows of inputs.

As `checkpoint/native/row_vectors.py`, which unpacks a row first and then reads it again. Here the numbers go from the
packed bytes to the products: a byte of 4 bits holds two columns, half a row apart (`integers.packed_rows`), so each of
its halves is of another group.

x86 with AVX512-VNNI multiplies bytes: four products and their sum are one instruction, of 64 numbers (VPDPBUSD).
Inputs then are two planes of bytes, 256 * high + low; both signed. Sums of a group are exact integers either way.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from checkpoint.native.row_vectors import (
    BYTE,
    FLOAT,
    INT,
    ROWS,
    SHORT,
    fetch,
    floats_of_integers,
    fused,
    long,
    pointer,
    products_of_pairs,
    shuffled,
    splat,
    sum_of_lanes,
    vector_function,
)

_BYTES = 64
"""Bytes of codes, and of each plane of inputs, that are multiplied at once."""
_LANES = (32, 16)
"""The same without products of bytes: inputs are integers of 16 bits."""
_INTEGERS = ir.VectorType(INT, _BYTES // 4)
_FEWER = (4, 1)
"""Groups whose offsets are multiplied at once, if fewer are left than a vector has."""
_AHEAD = 4096
"""Bytes of codes that are fetched before they are multiplied."""


@cache
def dots_of_packed(bits: int, width: int) -> tuple[Any, Any, Any]:
    """Multiply one row of inputs, and `ROWS`, with a packed row of so many bits whose groups have `width` columns. The
    last multiplies one whose steps are in the scales already. An output has the same bits from each."""
    return _dot(bits, width, 1), _dot(bits, width, ROWS), _dot(bits, width, 1, has_steps=False)


@cache
def has_planes(width: int) -> bool:
    """Whether inputs for groups of `width` columns are two planes of bytes."""
    features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return width % _BYTES == 0 and "+avx512vnni" in features


def _dot(bits: int, width: int, rows: int, has_steps: bool = True) -> Any:
    @intrinsic
    def dot(_context: Any, codes: Any, given: Any, levels: Any, sizes: Any, found: Any) -> Any:
        """As those of `row_vectors`, but for `codes`, the address of a packed row. A group is one chunk."""

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            kind = _PlaneDot if has_planes(width) else _Dot
            kind(builder, bits, width, (rows, has_steps), arguments).generate()
            return context.get_dummy_value()

        places, pair, four = (types.UniTuple(types.intp, count) for count in (3, 2, 4))
        return types.void(types.intp, places, pair, four, types.intp), generate

    return dot


class _Dot:
    """Generates one. `rows`: how many, and whether these have steps."""

    def __init__(self, builder: Any, bits: int, width: int, rows: tuple[int, bool], arguments: Any) -> None:
        self._builder = builder
        self._bits = bits
        self._width = width
        self._rows, self._has_steps = range(rows[0]), rows[1]
        self._runs = range(8 // bits)
        """Of neighbouring columns, each in its own bits of a byte."""
        self._codes, given, levels, sizes, self._found = arguments
        self._inputs, self._steps, self._sums = (builder.extract_value(given, n) for n in range(3))
        self._scales, self._offsets = (builder.extract_value(levels, n) for n in range(2))
        self._groups, self._apart = builder.extract_value(sizes, 0), builder.extract_value(sizes, 3)
        self._columns = builder.mul(self._groups, long(width))
        self._of_run = builder.udiv(self._groups, long(len(self._runs)))
        """Groups of a run."""
        self._code_bytes = builder.mul(self._of_run, long(width))
        self._lanes = self._choose_lanes()
        self._floats = ir.VectorType(FLOAT, self._sums_of_group())
        self._totals = {
            (row, run): cgutils.alloca_once_value(builder, ir.Constant(self._floats, None))
            for row in self._rows
            for run in self._runs
        }

    def _choose_lanes(self) -> int:
        """Bytes of codes at a time."""
        return next(lanes for lanes in _LANES if self._width % lanes == 0)

    def _sums_of_group(self) -> int:
        """How many integers are the sum of a group's products."""
        return self._lanes // 2

    def generate(self) -> None:
        builder = self._builder
        with cgutils.for_range(builder, self._of_run) as number:
            self._add_groups(number.index)
        self._subtract_offsets()
        for row in self._rows:
            total = builder.load(self._totals[row, 0])
            for run in self._runs[1:]:
                total = builder.fadd(total, builder.load(self._totals[row, run]))
            place = self._of_row(self._found, self._apart, row)
            builder.store(sum_of_lanes(builder, total), pointer(builder, place, FLOAT))

    def _add_groups(self, number: Any) -> None:
        """The group of this number of each run: their numbers are in the same bytes."""
        builder = self._builder
        start = builder.mul(number, long(self._width))
        sums: dict[tuple[int, int], Any] = {}
        fetch(builder, builder.add(builder.add(self._codes, start), long(_AHEAD)))
        for step in range(0, self._width, self._lanes):
            at = builder.add(start, long(step))
            for run, values in enumerate(self._numbers(builder.add(self._codes, at))):
                for row in self._rows:
                    sums[row, run] = self._added(values, self._given(row, run, at), sums.get((row, run)))
        for run in self._runs:
            group = builder.add(number, builder.mul(self._of_run, long(run)))
            scale = self._float(self._scales, group)
            for row in self._rows:
                level = scale
                if self._has_steps:
                    level = builder.fmul(scale, self._float(self._of_groups(self._steps, row), group))
                total = self._totals[row, run]
                value = floats_of_integers(builder, self._sum(sums[row, run]))
                builder.store(
                    fused(builder, value, splat(builder, level, value.type.count), builder.load(total)), total
                )

    def _of_row(self, address: Any, nbytes: Any, row: int) -> Any:
        """Where a row begins, if rows are so many bytes apart."""
        return self._builder.add(address, self._builder.mul(nbytes, long(row)))

    def _numbers(self, address: Any) -> list[Any]:
        """Of each run, int16."""
        builder, wide = self._builder, ir.VectorType(SHORT, self._lanes)
        held = builder.load(pointer(builder, address, ir.VectorType(BYTE, self._lanes)), align=1)
        return self._of_runs(builder.zext(held, wide))

    def _of_runs(self, held: Any) -> list[Any]:
        if self._bits == 8:
            return [held]
        builder, kind = self._builder, held.type
        mask, shift = (ir.Constant(kind, [number] * kind.count) for number in ((1 << self._bits) - 1, self._bits))
        return [builder.and_(held, mask), builder.lshr(held, shift)]

    def _given(self, row: int, run: int, at: Any) -> Any:
        """Inputs, int16."""
        place = self._builder.mul(self._builder.add(self._place(row, run), at), long(2))
        kind = ir.VectorType(SHORT, self._lanes)
        return self._builder.load(pointer(self._builder, self._builder.add(self._inputs, place), kind), align=2)

    def _added(self, values: Any, given: Any, before: Any) -> Any:
        """A group's sum, with the products of some columns."""
        product = products_of_pairs(self._builder, values, given)
        return product if before is None else self._builder.add(product, before)

    def _sum(self, sums: Any) -> Any:
        return sums

    def _place(self, row: int, run: int) -> Any:
        """The first column of a run of a row of inputs."""
        builder = self._builder
        return builder.add(builder.mul(self._columns, long(row)), builder.mul(self._code_bytes, long(run)))

    def _subtract_offsets(self) -> None:
        """Offsets times the sums of the inputs of their groups, from the totals of the first run."""
        builder, done = self._builder, long(0)
        for lanes in (self._floats.count, *_FEWER):
            many = ir.VectorType(FLOAT, lanes)
            less = [cgutils.alloca_once_value(builder, ir.Constant(many, None)) for _ in self._rows]
            count = builder.udiv(builder.sub(self._groups, done), long(lanes))
            with cgutils.for_range(builder, count) as step:
                at = builder.mul(builder.add(done, builder.mul(step.index, long(lanes))), long(4))
                offsets = builder.load(pointer(builder, builder.add(self._offsets, at), many), align=4)
                for row, total in enumerate(less):
                    sums = builder.add(self._of_groups(self._sums, row), at)
                    own = builder.load(pointer(builder, sums, many), align=4)
                    builder.store(fused(builder, offsets, own, builder.load(total)), total)
            done = builder.add(done, builder.mul(count, long(lanes)))
            places = [min(lane, lanes) for lane in range(self._floats.count)]
            for row, total in enumerate(less):
                wide = shuffled(builder, builder.load(total), ir.Constant(many, None), places)
                of_all = self._totals[row, 0]
                builder.store(builder.fsub(builder.load(of_all), wide), of_all)

    def _of_groups(self, address: Any, row: int) -> Any:
        """Where a row of floats begins, one a group."""
        return self._of_row(address, self._builder.mul(self._groups, long(4)), row)

    def _float(self, address: Any, place: Any) -> Any:
        builder = self._builder
        return builder.load(pointer(builder, builder.add(address, builder.mul(place, long(4))), FLOAT))


class _PlaneDot(_Dot):
    """With products of bytes."""

    def _choose_lanes(self) -> int:
        return _BYTES

    def _sums_of_group(self) -> int:
        return _BYTES // 4

    def _numbers(self, address: Any) -> list[Any]:
        """Of each run, uint8, four in an integer."""
        builder = self._builder
        held = builder.load(pointer(builder, address, ir.VectorType(BYTE, _BYTES)), align=1)
        return [builder.bitcast(one, _INTEGERS) for one in self._of_runs(held)]

    def _given(self, row: int, run: int, at: Any) -> Any:
        """Both planes of the inputs."""
        builder = self._builder
        first = builder.add(self._inputs, builder.mul(self._columns, long(2 * row)))
        high = builder.add(first, builder.add(builder.mul(self._code_bytes, long(run)), at))
        return tuple(
            builder.load(pointer(builder, one, _INTEGERS), align=1) for one in (high, builder.add(high, self._columns))
        )

    def _added(self, values: Any, given: Any, before: Any) -> Any:
        """Sums of both planes."""
        pair = before or (ir.Constant(_INTEGERS, None),) * 2
        return tuple(self._products(values, plane, sums) for plane, sums in zip(given, pair, strict=True))

    def _products(self, values: Any, plane: Any, sums: Any) -> Any:
        name = "llvm.x86.avx512.vpdpbusd.512"
        function = vector_function(self._builder, name, _INTEGERS, [_INTEGERS] * 3)
        return self._builder.call(function, [sums, values, plane])

    def _sum(self, sums: Any) -> Any:
        high, low = sums
        eight = ir.Constant(_INTEGERS, [8] * _INTEGERS.count)
        return self._builder.add(self._builder.shl(high, eight), low)


def is_packed(bits: int, width: int, groups: int, chunks: int) -> bool:
    """Whether `dots_of_packed` multiplies such rows: each run of columns is whole groups, and a group one chunk."""
    return bits in (4, 8) and groups == chunks and groups * bits % 8 == 0 and any(width % n == 0 for n in _LANES)
