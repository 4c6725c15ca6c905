"""Codes that name values of a table, with a scale for each group of inputs.

NF4, FP4 and int8 of bitsandbytes, NVFP4 and MXFP4 of compressed-tensors, and Q2_K, IQ4_NL, IQ4_XS and MXFP4 of GGUF are
such. A value is table[code] * scale, less a minimum where there is one. Scales may be codes of a table themselves. The
formats (`checkpoint/formats/`) make the parts from what their publishers store.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from checkpoint.native.encoding import (
    CODES,
    SCALES,
    CheckWeight,
    Encoding,
    Parts,
    Shapes,
    Unencodable,
    first_bytes,
    shares_of_rows,
)
from checkpoint.native.integers import (
    MINIMUM_UNITS,
    SCALE_UNITS,
    Integers,
    _copy_numbers,
    _level,
    contiguous_rows,
    described_bits,
    packed_rows,
)
from checkpoint.native.routine_check import Routine

TABLE, SCALE_TABLE, SCALE_OFFSETS, FACTORS = "table", "scale_table", "scale_offsets", "factors"
UNIT_STARTS = "unit_starts"
UNIT_GROUPS = 256
"""Groups whose scales have a unit together, counted over a matrix: bitsandbytes has them so, whatever the rows are."""
_UNIT_BITS = 8
LEAST_GROUP = 8
_OF_ROWS = (SCALES, SCALE_UNITS, UNIT_STARTS, MINIMUM_UNITS)
_OF_MATRICES = (TABLE, SCALE_TABLE, SCALE_OFFSETS, FACTORS)
_FLOATS = ("float16", "bfloat16", "float32")
_VALUE_BYTES = 4 + 4 + 2
"""Of scratch memory for each value: product, place in the table, and a number twice or a half."""
_COLUMN_BYTES = 16


class Codebook(Encoding):
    """A weight [rows, columns], each row in groups of equally many columns. It consists of n matrices with as many rows
    each, which have tables of their own.

    - `codes`: uint8 [rows, columns * bits / 8], see `packed_rows`.
    - `table`: float32 [n, 2^bits].
    - `scales`: a float [rows, groups]. Or uint8, names of values in `scale_table`: float32 [n, 256]. These are
      multiplied by `scale_units`, where there are some: float32 [rows, 1], or with `unit_starts` as `scale_units_of`
      has them. Then `scale_offsets` are added: float32 [n, 1].
    - Or `scales`: int8, multiples of `scale_units`: float16 [rows, some groups]. Or uint8 with `minimum_units` too,
      also float16 [rows, some groups]: 4 bits for a scale and, above them, 4 for a minimum.
    - `factors`: a float [n, 1]. A product is rounded to their dtype, multiplied by them, and rounded to the weight's.
      Without them it is rounded once.

    A weight without a table is one of `integers`, where they are given: a GGUF file has both kinds.
    """

    parts = (CODES, SCALES)
    more_parts = (*Integers.more_parts, UNIT_STARTS, *_OF_MATRICES)
    compiled_dtypes = (torch.bfloat16, torch.float16, torch.float32)

    def __init__(self, name: str, integers: Integers | None = None) -> None:
        self.name = name
        self._integers = integers

    def encode(self, published: Parts) -> dict[str, torch.Tensor]:
        """The same, each [n, ...]."""
        return contiguous_rows(published)

    def fits_weight(self, shape: tuple[int, ...], parts: Shapes) -> bool:
        if TABLE not in parts:
            alone = parts.keys().isdisjoint((UNIT_STARTS, *_OF_MATRICES))
            return alone and self._integers is not None and self._integers.fits_weight(shape, parts)
        if len(shape) != 2 or any(len(of) != 2 for _, of in parts.values()):
            return False
        (rows, columns), (kind, (height, wide)) = shape, parts[CODES]
        matrices, values = parts[TABLE][1]
        bits, groups = 8 * wide // columns, parts[SCALES][1][1]
        return (
            (kind, height, 8 * wide) == ("uint8", rows, bits * columns)
            and bits in (1, 2, 4, 8)
            and parts[TABLE] == ("float32", (matrices, 1 << bits))
            and values == 1 << bits
            and rows % matrices == 0
            and columns % groups == 0
            and columns // groups >= LEAST_GROUP
            and parts[SCALES][1] == (rows, groups)
            and _fits_scales(rows, matrices, parts)
            and (FACTORS not in parts or (parts[FACTORS][0] in _FLOATS and parts[FACTORS][1] == (matrices, 1)))
            and parts.keys() <= {CODES, *_OF_ROWS, *_OF_MATRICES}
        )

    def described(self, full: Shapes, native: Shapes) -> str:
        return described_bits(self.name, full, native)

    def scratch_bytes(self, shape: tuple[int, ...], piece: int) -> int:
        rows, columns = shape
        own = columns * (_COLUMN_BYTES + _VALUE_BYTES * _rows_at_once(rows, columns, piece))
        return max(own, self._integers.scratch_bytes(shape, piece)) if self._integers else own

    def shares(self, target: torch.Tensor, parts: Parts, threads: int) -> Iterator[list[tuple[torch.Tensor, Parts]]]:
        if TABLE not in parts:
            yield from self._of_integers().shares(target, parts, threads)
            return
        for matrix, theirs in _matrices(target, parts):
            yield shares_of_rows(matrix, theirs, threads)

    def restore(self, target: torch.Tensor, parts: Parts, scratch: torch.Tensor, piece: int) -> None:
        if TABLE not in parts:
            self._of_integers().restore(target, parts, scratch, piece)
            return
        for matrix, theirs in _matrices(target, parts):
            rows, columns = matrix.shape
            step = _rows_at_once(rows, columns, piece)
            for first in range(0, rows, step):
                _restore(matrix[first : first + step], _rows_of(theirs, rows, first, first + step), scratch)

    def routine(self, dtype: torch.dtype = torch.bfloat16) -> Routine:
        from checkpoint.native import codebook_routines as routines  # loads numba: not before it is needed

        of_integers = self._integers.routine(dtype) if self._integers else None
        compiled, kept = {
            torch.bfloat16: (routines.codebook_in_bfloat16, torch.uint16),
            torch.float16: (routines.codebook_in_float16, torch.uint16),
            torch.float32: (routines.codebook_in_float32, torch.float32),
        }[dtype]
        roundings = {torch.float16: routines.TO_HALF, torch.bfloat16: routines.TO_BFLOAT}

        def restore(target: torch.Tensor, parts: Parts, scratch: torch.Tensor) -> None:
            if TABLE not in parts and of_integers is not None:
                of_integers(target, parts, scratch)
                return
            rounded = parts[FACTORS].dtype if FACTORS in parts else torch.float32
            for matrix, theirs in _matrices(target, parts):
                bits, codes, table = matrix.view(kept), theirs[CODES].view(len(matrix), -1), theirs[TABLE].view(-1)
                factor = float(theirs[FACTORS]) if FACTORS in parts else 1.0
                once = rounded is dtype and factor == 1.0
                rounding = routines.EXACT if once else roundings.get(rounded, routines.EXACT)
                for first, last, levels, row in _levels(matrix, theirs, scratch):
                    some = bits[first:last].numpy(), codes[first:last].numpy()
                    compiled(*some, *levels, table.numpy(), factor, rounding, row)

        return restore

    def restores_compiled(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2

    def check_weights(self) -> list[CheckWeight]:
        return [*_check_weights(), *(self._integers.check_weights() if self._integers else ())]

    def _of_integers(self) -> Integers:
        """Raises ValueError where the weights of this encoding have tables."""
        if self._integers is None:
            raise ValueError(f"a weight of the encoding {self.name} has no table")
        return self._integers


def _rows_at_once(rows: int, columns: int, piece: int) -> int:
    return min(max(piece // max(columns, 1), 1), rows)


def _fits_scales(rows: int, matrices: int, parts: Shapes) -> bool:
    """Scales as floats, codes of a table, or multiples of units."""
    kind, (_, groups) = parts[SCALES]
    units, offsets, least = (parts.get(name) for name in (SCALE_UNITS, SCALE_OFFSETS, MINIMUM_UNITS))
    if SCALE_TABLE in parts:
        return (
            kind == "uint8"
            and parts[SCALE_TABLE] == ("float32", (matrices, 256))
            and offsets in (None, ("float32", (matrices, 1)))
            and least is None
            and _fits_units(rows, groups, units, parts.get(UNIT_STARTS))
        )
    if offsets is not None or UNIT_STARTS in parts:
        return False
    if kind in ("int8", "uint8"):
        fits = units is not None and units[0] == "float16" and units[1][0] == rows and groups % units[1][1] == 0
        return fits and least == (units if kind == "uint8" else None)
    return kind in _FLOATS and units is least is None


def _fits_units(rows: int, groups: int, units: Any, starts: Any) -> bool:
    if starts is None:
        return units in (None, ("float32", (rows, 1)))
    return (units, starts) == (("float32", (rows, _most_units(groups))), ("uint8", (rows, 1)))


def _most_units(groups: int) -> int:
    """How many units the groups of a row can have, wherever its first one is."""
    return (groups + UNIT_GROUPS - 2) // UNIT_GROUPS + 1


def _matrices(target: torch.Tensor, parts: Parts) -> Iterator[tuple[torch.Tensor, Parts]]:
    """The matrices of a weight, one after the other."""
    count = len(parts[TABLE])
    if count == 1:
        yield target, parts
        return
    divided = {name: part.chunk(count) for name, part in {**parts, CODES: parts[CODES].view(len(target), -1)}.items()}
    for number, matrix in enumerate(target.chunk(count)):
        yield matrix, {name: chunks[number] for name, chunks in divided.items()}


def _rows_of(parts: Parts, rows: int, first: int, last: int) -> dict[str, torch.Tensor]:
    """The parts of some rows of a matrix."""
    of_rows = {name: parts[name][first:last] for name in _OF_ROWS if name in parts}
    return {**parts, **of_rows, CODES: parts[CODES].view(rows, -1)[first:last]}


def _restore(target: torch.Tensor, parts: Parts, scratch: torch.Tensor) -> None:
    (rows, columns), count = target.shape, target.numel()
    product, places = scratch[: 8 * count].view(torch.float32).split(count)
    rest = scratch[8 * count : 10 * count]
    places = places.view(torch.int32)
    _copy_numbers(places.view(rows, columns), parts[CODES], 8 * parts[CODES].shape[1] // columns, rest)
    torch.index_select(parts[TABLE].view(-1), 0, places, out=product)
    groups = parts[SCALES].shape[1]
    levels, room = places.view(torch.float32).split([rows * groups, count - rows * groups])  # the places are read
    of_groups, levels = product.view(rows, groups, -1), levels.view(rows, groups, 1)
    _copy_scales(levels, parts, room)
    of_groups.mul_(levels)
    if MINIMUM_UNITS in parts:
        _copy_minimums(levels, parts, room)
        of_groups.sub_(levels)
    if FACTORS in parts:
        factor = parts[FACTORS].view(-1)
        if factor.dtype is not torch.float32:
            product.copy_(rest.view(factor.dtype).copy_(product))
        product.mul_(factor)
    target.copy_(product.view(rows, columns))


def _copy_minimums(target: torch.Tensor, parts: Parts, scratch: torch.Tensor) -> None:
    """As `_copy_scales`."""
    steps = scratch.view(torch.uint8)[: target.numel()].view(parts[SCALES].shape)
    torch.bitwise_right_shift(parts[SCALES], 4, out=steps)
    _copy_multiples(target, steps, parts[MINIMUM_UNITS], scratch[target.numel() :])


def _copy_multiples(
    target: torch.Tensor, steps: torch.Tensor, units: torch.Tensor | None, scratch: torch.Tensor
) -> None:
    parts = {SCALES: steps} if units is None else {SCALES: steps, SCALE_UNITS: units}
    _level(SCALES, parts, None, target.view(-1), scratch.view(torch.uint8))


def _copy_scales(target: torch.Tensor, parts: Parts, scratch: torch.Tensor) -> None:
    """The scales of some rows, float32 [rows, groups]. `scratch`: float32, twice as long."""
    scales, count = parts[SCALES], target.numel()
    if SCALE_TABLE not in parts:
        if MINIMUM_UNITS in parts:
            steps = scratch.view(torch.uint8)[:count].view(scales.shape)
            scales = torch.bitwise_and(scales, 15, out=steps)
        _copy_multiples(target, scales, parts.get(SCALE_UNITS), scratch[count:])
        return
    places = scratch[:count].view(torch.int32).copy_(scales.view(-1))
    flat = target.view(-1)
    torch.index_select(parts[SCALE_TABLE].view(-1), 0, places, out=flat)
    if UNIT_STARTS in parts:
        units, found = parts[SCALE_UNITS], scratch[count : 2 * count]
        _number_units(places.view(scales.shape), parts[UNIT_STARTS], units.shape[1])
        flat.mul_(torch.index_select(units.view(-1), 0, places, out=found))
    elif SCALE_UNITS in parts:
        target.view(scales.shape).mul_(parts[SCALE_UNITS])
    if SCALE_OFFSETS in parts:
        flat.add_(parts[SCALE_OFFSETS].view(-1))


def _number_units(target: torch.Tensor, starts: torch.Tensor, each: int) -> None:
    """Which unit a group's scale has, of all units of these rows, `each` of a row: int32 [rows, groups]."""
    rows, groups = target.shape
    target.copy_(torch.arange(groups, dtype=torch.int32, device=target.device))
    target.add_(starts).bitwise_right_shift_(_UNIT_BITS)
    target.add_(torch.arange(0, rows * each, each, dtype=torch.int32, device=target.device).unsqueeze(1))


def _levels(
    target: torch.Tensor, parts: Parts, scratch: torch.Tensor
) -> Iterator[tuple[int, int, tuple[Any, Any], tuple[Any, Any]]]:
    """Rows from one to another of a matrix; their scales and minimums in float32 (empty where there are none); and
    scratch for a row: values and numbers. All as numpy has them, and valid until the next ones."""
    (rows, columns), groups = target.shape, parts[SCALES].shape[1]
    step = min(max((len(scratch) - 8 * columns) // (16 * groups), 1), rows)
    room = first_bytes(scratch, 8 * columns + 16 * step * groups)
    scales, minimums, rest = (
        room[: 16 * step * groups].view(torch.float32).tensor_split([step * groups, 2 * step * groups])
    )
    values = room[16 * step * groups :][: 4 * columns].view(torch.float32)
    row = values.numpy(), room[16 * step * groups + 4 * columns :][:columns].numpy()
    for first in range(0, rows, step):
        last = min(first + step, rows)
        some, shape = _rows_of(parts, rows, first, last), (last - first, groups)
        scale = scales[: shape[0] * groups].view(shape)
        _copy_scales(scale, some, rest)
        least = minimums[: shape[0] * groups].view(shape) if MINIMUM_UNITS in parts else minimums[:0].view(0, 0)
        if MINIMUM_UNITS in parts:
            _copy_minimums(least, some, rest)
        yield first, last, (scale.numpy(), least.numpy()), row


def _check_weights() -> Iterator[CheckWeight]:
    """Every code with scales from the least to the largest, in each dtype of scales and each rounding."""
    evenly = partial(torch.linspace, dtype=torch.float32)
    random = torch.Generator().manual_seed(0)
    halves = torch.arange(1 << 16, dtype=torch.int32)[::13].to(torch.uint16).view(torch.float16)
    halves = halves[halves.isfinite()]
    halves = halves[: len(halves) // 32 * 32].view(-1, 8)
    wide = evenly(-140.0, 110.0, 512).exp2().view(-1, 8) * torch.tensor([1.0, -1.0]).repeat(4)
    for number, scales in enumerate((halves, wide, wide.bfloat16())):
        bits = (4, 8, 4)[number]
        rows, columns = len(scales), 8 * 40
        numbers = (torch.arange(rows * columns) * 7 % (1 << bits)).to(torch.uint8).view(rows, columns)
        table = evenly(-1.3, 1.0, 1 << bits).view(1, -1).repeat(2, 1)
        parts = {CODES: packed_rows(numbers, bits), SCALES: scales, TABLE: table}
        yield (rows, columns), parts
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            yield (rows, columns), parts | {FACTORS: torch.full((2, 1), 0.75, dtype=dtype)}
    numbers = torch.randint(0, 256, (70, 320), dtype=torch.uint8, generator=random)
    codes = {CODES: packed_rows(numbers & 15, 4), TABLE: evenly(-1.0, 1.0, 16).view(1, 16)}
    named = codes | {SCALES: numbers[:, :20].contiguous(), SCALE_TABLE: evenly(-1.0, 1.0, 256).view(1, 256)}
    yield (70, 320), named
    units = evenly(-20.0, 3.0, 6).exp2()
    yield (70, 320), named | {SCALE_UNITS: units.repeat(12)[:70].view(70, 1)}
    yield (70, 320), named | scale_units_of(units, 70, 20) | {SCALE_OFFSETS: evenly(0.3, 0.3, 1).view(1, 1)}
    steps, some, others = numbers[:, :20].contiguous(), halves[:70, :4].contiguous(), halves[70:140, :4].contiguous()
    yield (70, 320), codes | {SCALES: steps.view(torch.int8), SCALE_UNITS: some}
    yield (70, 320), codes | {SCALES: steps, SCALE_UNITS: some, MINIMUM_UNITS: others}


def scale_units_of(units: torch.Tensor, rows: int, groups: int) -> dict[str, torch.Tensor]:
    """The parts of units, float32, each of 256 groups of a matrix, one row after the other: those of each row.

    Where they end within rows, `unit_starts` (uint8 [rows, 1]) are how many groups of its first unit are in earlier
    rows. So some rows of a matrix can be restored without the others.
    """
    first = torch.arange(rows) * groups
    starts = first % UNIT_GROUPS
    if int((starts + groups).max()) <= UNIT_GROUPS:
        return {SCALE_UNITS: units[first // UNIT_GROUPS].unsqueeze(1)}
    places = (first // UNIT_GROUPS).unsqueeze(1) + torch.arange(_most_units(groups))
    return {SCALE_UNITS: units[places.clamp_(max=len(units) - 1)], UNIT_STARTS: starts.to(torch.uint8).unsqueeze(1)}


def named_scales(scales: torch.Tensor, table: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parts of scales, uint8 [rows, groups], that name values of a table, float32 [256].

    Raises Unencodable where one of these is NaN or infinity.
    """
    if not bool(table[scales.int()].isfinite().all()):
        raise Unencodable("a scale is NaN or infinity")
    return {SCALES: scales, SCALE_TABLE: table.nan_to_num(0.0, 0.0, 0.0).unsqueeze(0)}
