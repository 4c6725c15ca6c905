"""Vectors of LLVM that multiply a packed row of a weight, of 4 or 8 bits, with some rows of inputs.

As `checkpoint/native/row_vectors.py`, which unpacks a row first and then reads it again. Here the numbers go from the
packed bytes to the products: a byte of 4 bits holds two columns, half a row apart (`integers.packed_rows`), so each of
its halves is of another group.
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
    ROWS,
    SHORT,
    fetch,
    floats_of_integers,
    fused,
    long,
    pointer,
    products_of_pairs,
    splat,
    sum_of_lanes,
)

_LANES = (32, 16)
_OFFSETS = 8
"""Groups whose offsets are multiplied at once."""
_AHEAD = 4096
"""Bytes of codes that are fetched before they are multiplied."""


@cache
def dots_of_packed(bits: int, width: int) -> tuple[Any, Any]:
    """Multiply one row of inputs, and `ROWS`, with a packed row of so many bits whose groups have `width` columns."""
    return _dot(bits, width, 1), _dot(bits, width, ROWS)


def _dot(bits: int, width: int, rows: int) -> Any:
    @intrinsic
    def dot(_context: Any, codes: Any, given: Any, levels: Any, sizes: Any, found: Any) -> Any:
        """As those of `row_vectors`, but for `codes`, the address of a packed row. A group is one chunk."""

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            _Dot(builder, bits, width, rows, arguments).generate()
            return context.get_dummy_value()

        places, pair, four = (types.UniTuple(types.intp, count) for count in (3, 2, 4))
        return types.void(types.intp, places, pair, four, types.intp), generate

    return dot


class _Dot:
    """Generates one."""

    def __init__(self, builder: Any, bits: int, width: int, rows: int, arguments: Any) -> None:
        self._builder = builder
        self._bits = bits
        self._width = width
        self._rows = range(rows)
        self._runs = range(8 // bits)
        """Of neighbouring columns, each in its own bits of a byte."""
        self._lanes = next(lanes for lanes in _LANES if width % lanes == 0)
        self._codes, given, levels, sizes, self._found = arguments
        self._inputs, self._steps, self._sums = (builder.extract_value(given, n) for n in range(3))
        self._scales, self._offsets = (builder.extract_value(levels, n) for n in range(2))
        self._groups, self._apart = builder.extract_value(sizes, 0), builder.extract_value(sizes, 3)
        self._columns = builder.mul(self._groups, long(width))
        self._of_run = builder.udiv(self._groups, long(len(self._runs)))
        """Groups of a run."""
        self._floats = ir.VectorType(FLOAT, self._lanes // 2)
        none = ir.Constant(self._floats, [0.0] * self._floats.count)
        self._totals = {
            (row, run): cgutils.alloca_once_value(builder, none) for row in self._rows for run in self._runs
        }

    def generate(self) -> None:
        builder = self._builder
        with cgutils.for_range(builder, self._of_run) as number:
            self._add_groups(number.index)
        for row in self._rows:
            total = builder.load(self._totals[row, 0])
            for run in self._runs[1:]:
                total = builder.fadd(total, builder.load(self._totals[row, run]))
            value = builder.fsub(sum_of_lanes(builder, total), self._less(row))
            builder.store(value, pointer(builder, builder.add(self._found, builder.mul(self._apart, long(row))), FLOAT))

    def _add_groups(self, number: Any) -> None:
        """The group of this number of each run: their numbers are in the same bytes."""
        builder = self._builder
        start = builder.mul(number, long(self._width))
        fetch(builder, builder.add(builder.add(self._codes, start), long(_AHEAD)))
        sums: dict[tuple[int, int], Any] = {}
        for step in range(0, self._width, self._lanes):
            at = builder.add(start, long(step))
            for run, values in enumerate(self._numbers(builder.add(self._codes, at))):
                for row in self._rows:
                    place = builder.mul(builder.add(self._place(row, run), at), long(2))
                    kind = ir.VectorType(SHORT, self._lanes)
                    given = builder.load(pointer(builder, builder.add(self._inputs, place), kind), align=2)
                    product = products_of_pairs(builder, values, given)
                    before = sums.get((row, run))
                    sums[row, run] = product if before is None else builder.add(product, before)
        for run in self._runs:
            group = builder.add(number, builder.mul(self._of_run, long(run)))
            scale = self._float(self._scales, group)
            for row in self._rows:
                at = builder.add(builder.mul(self._groups, long(row)), group)
                level = builder.fmul(scale, self._float(self._steps, at))
                total = self._totals[row, run]
                value = floats_of_integers(builder, sums[row, run])
                builder.store(
                    fused(builder, value, splat(builder, level, value.type.count), builder.load(total)), total
                )

    def _numbers(self, address: Any) -> list[Any]:
        """Of each run, int16."""
        builder, wide = self._builder, ir.VectorType(SHORT, self._lanes)
        held = builder.load(pointer(builder, address, ir.VectorType(BYTE, self._lanes)), align=1)
        both = builder.zext(held, wide)
        if self._bits == 8:
            return [both]
        mask, shift = (ir.Constant(wide, [number] * self._lanes) for number in ((1 << self._bits) - 1, self._bits))
        return [builder.and_(both, mask), builder.lshr(both, shift)]

    def _place(self, row: int, run: int) -> Any:
        """The first column of a run of a row of inputs."""
        builder = self._builder
        of_run = builder.mul(builder.mul(self._of_run, long(self._width)), long(run))
        return builder.add(builder.mul(self._columns, long(row)), of_run)

    def _less(self, row: int) -> Any:
        """Offsets times the sums of the inputs of their groups."""
        builder, many = self._builder, ir.VectorType(FLOAT, _OFFSETS)
        total = cgutils.alloca_once_value(builder, ir.Constant(many, [0.0] * _OFFSETS))
        rest = cgutils.alloca_once_value(builder, ir.Constant(FLOAT, 0.0))
        own = builder.add(self._sums, builder.mul(builder.mul(self._groups, long(row)), long(4)))
        vectors = builder.udiv(self._groups, long(_OFFSETS))
        with cgutils.for_range(builder, vectors) as step:
            at = builder.mul(step.index, long(4 * _OFFSETS))
            one, other = (
                builder.load(pointer(builder, builder.add(base, at), many), align=4) for base in (self._offsets, own)
            )
            builder.store(fused(builder, one, other, builder.load(total)), total)
        done = builder.mul(vectors, long(_OFFSETS))
        with cgutils.for_range(builder, builder.sub(self._groups, done)) as left:
            group = builder.add(done, left.index)
            product = builder.fmul(self._float(self._offsets, group), self._float(own, group))
            builder.store(builder.fadd(builder.load(rest), product), rest)
        return builder.fadd(sum_of_lanes(builder, builder.load(total)), builder.load(rest))

    def _float(self, address: Any, place: Any) -> Any:
        builder = self._builder
        return builder.load(pointer(builder, builder.add(address, builder.mul(place, long(4))), FLOAT))


def is_packed(bits: int, width: int, groups: int, chunks: int) -> bool:
    """Whether `dots_of_packed` multiplies such rows: each run of columns is whole groups, and a group one chunk."""
    return bits in (4, 8) and groups == chunks and groups * bits % 8 == 0 and any(width % n == 0 for n in _LANES)
