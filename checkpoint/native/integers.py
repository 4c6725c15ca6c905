"""Integers of 1 to 8 bits with a scale for each group of inputs, as AWQ, GPTQ, compressed-tensors and GGUF have them.

A value is (number - zero) * scale, or number * scale + minimum. `Integers` says what each part holds; the formats
(`checkpoint/formats/`) make the parts from what their publishers store.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from checkpoint.native.routine_check import Routine

ZEROS, MINIMUMS, ORDER = "zeros", "minimums", "order"
SCALE_UNITS, MINIMUM_UNITS = "scale_units", "minimum_units"
_UNITS = {SCALES: SCALE_UNITS, MINIMUMS: MINIMUM_UNITS}
_FLOATS = ("float16", "bfloat16", "float32")
_STEPS = ("uint8", "int8")
_WIDTHS = (8, 4, 2, 1)
_VALUE_BYTES = 4 + 4 + 2
"""Of scratch memory for each value: product, factor, and a number twice or a half."""
_COLUMN_BYTES = 16
"""And for each column, whatever the number of rows: its group, or what a compiled routine has of a row."""
_MOST_GROUPS = 1 << 15


class Integers(Encoding):
    """A weight [rows, columns], each row in groups of equally many columns.

    - `codes`: uint8 [rows, columns * bits / 8], see `packed_rows`.
    - `scales`: a float [rows, groups]. Or uint8 or int8, multiples of `scale_units`: float16 [rows, some groups].
    - `zeros`: uint8 [rows, groups]. Without them, and without minimums, zero is half of what `bits` can hold.
    - `minimums`: a float [rows, groups]. Or uint8, with `minimum_units` as above, and then subtracted.
    - `order`: int16 [n, columns], the group of each column where they are in any order, as GPTQ's `desc_act` leaves
      them. Of n matrices with as many rows, each has its own.

    `rounds`: a product is rounded to the dtype of its scale, and then to the weight's, as AWQ, GPTQ and
    compressed-tensors do. Else it is in float32, and rounded once, as the package gguf has it.
    """

    parts = (CODES, SCALES)
    more_parts = (ZEROS, MINIMUMS, ORDER, SCALE_UNITS, MINIMUM_UNITS)
    compiled_dtypes = (torch.bfloat16, torch.float16, torch.float32)

    def __init__(self, name: str, rounds: bool) -> None:
        self.name = name
        self._rounds = rounds

    def encode(self, published: Parts) -> dict[str, torch.Tensor]:
        """The same, each [n, ...], but for `order`, which is int64."""
        parts = contiguous_rows(published)
        if ORDER in parts:
            groups, order = parts[SCALES].shape[-1], parts[ORDER]
            if groups > _MOST_GROUPS or int(order.min()) < 0 or int(order.max()) >= groups:
                raise Unencodable(f"a weight has {groups} groups, and inputs of group {int(order.max())}")
            parts[ORDER] = order.to(torch.int16)
        return parts

    def fits_weight(self, shape: tuple[int, ...], parts: Shapes) -> bool:
        if len(shape) != 2 or any(len(of) != 2 for _, of in parts.values()):
            return False
        rows, columns = shape
        kind, (height, wide) = parts[CODES]
        bits = 8 * wide // columns
        if kind != "uint8" or height != rows or bits not in range(1, 9) or wide * 8 != bits * columns:
            return False
        if columns % (8 // _planes(bits)[-1]):
            return False
        groups = parts[SCALES][1][1]
        if groups > columns or (ORDER not in parts and columns % groups):
            return False
        if not all(_fits_level(rows, columns, parts, name) for name in _UNITS if name in parts):
            return False
        if MINIMUMS in parts and (ZEROS in parts or self._rounds):
            return False
        if MINIMUM_UNITS in parts and MINIMUMS not in parts:
            return False
        if parts.get(ZEROS, ("uint8", (rows, groups))) != ("uint8", (rows, groups)):
            return False
        return ORDER not in parts or _fits_order(rows, columns, parts)

    def described(self, full: Shapes, native: Shapes) -> str:
        return described_bits(self.name, full, native)

    def scratch_bytes(self, shape: tuple[int, ...], piece: int) -> int:
        rows, columns = shape
        return columns * (_COLUMN_BYTES + _VALUE_BYTES * _rows_at_once(rows, columns, piece))

    def shares(self, target: torch.Tensor, parts: Parts, threads: int) -> Iterator[list[tuple[torch.Tensor, Parts]]]:
        for share in _matrices(target, parts):
            yield shares_of_rows(*share, threads)

    def restore(self, target: torch.Tensor, parts: Parts, scratch: torch.Tensor, piece: int) -> None:
        for matrix, theirs in _matrices(target, parts):
            rows, columns = matrix.shape
            step = _rows_at_once(rows, columns, piece)
            codes = theirs[CODES].view(rows, -1)
            order = None
            if ORDER in theirs:
                order = scratch[: 4 * columns].view(torch.int32)
                order.copy_(theirs[ORDER].view(-1)).clamp_(0, theirs[SCALES].shape[1] - 1)  # it may be damaged
            for first in range(0, rows, step):
                last = min(first + step, rows)
                some = {name: part[first:last] for name, part in theirs.items() if name not in (CODES, ORDER)}
                self._restore(matrix[first:last], codes[first:last], some, order, scratch[4 * columns :])

    def _restore(
        self, target: torch.Tensor, codes: torch.Tensor, parts: Parts, order: torch.Tensor | None, scratch: torch.Tensor
    ) -> None:
        (rows, columns), count = target.shape, target.numel()
        product, factors = scratch[: 8 * count].view(torch.float32).split(count)
        rest = scratch[8 * count : 10 * count]
        bits = 8 * codes.shape[1] // columns
        _copy_numbers(product.view(rows, columns), codes, bits, rest)
        groups = columns if order is not None else parts[SCALES].shape[1]
        of_groups = product.view(rows, groups, -1)
        if ZEROS in parts:
            of_groups.sub_(_level(ZEROS, parts, order, factors, rest))
        elif MINIMUMS not in parts:
            product.sub_(float(1 << bits - 1))
        of_groups.mul_(_level(SCALES, parts, order, factors, rest))
        if MINIMUMS in parts:
            least = _level(MINIMUMS, parts, order, factors, rest)
            (of_groups.sub_ if MINIMUM_UNITS in parts else of_groups.add_)(least)
        dtype = parts[SCALES].dtype
        if self._rounds and dtype in (torch.float16, torch.bfloat16):
            target.copy_(rest.view(dtype).copy_(product).view(rows, columns))
        else:
            target.copy_(product.view(rows, columns))

    def routine(self, dtype: torch.dtype = torch.bfloat16) -> Routine:
        from checkpoint.native import integer_routines as routines  # loads numba: not before it is needed

        compiled, kept = {
            torch.bfloat16: (routines.integers_in_bfloat16, torch.uint16),
            torch.float16: (routines.integers_in_float16, torch.uint16),
            torch.float32: (routines.integers_in_float32, torch.float32),
        }[dtype]
        roundings = {torch.float16: routines.TO_HALF, torch.bfloat16: routines.TO_BFLOAT}

        def restore(target: torch.Tensor, parts: Parts, scratch: torch.Tensor) -> None:
            scale = parts[SCALES].dtype
            rounding = roundings.get(scale, routines.EXACT) if self._rounds and scale is not dtype else routines.EXACT
            for matrix, theirs in _matrices(target, parts):
                bits, codes = matrix.view(kept), theirs[CODES].view(len(matrix), -1)
                order = theirs[ORDER].view(-1) if ORDER in theirs else torch.empty(0, dtype=torch.int16)
                for first, last, levels, row in _levels(matrix, theirs, scratch):
                    compiled(bits[first:last].numpy(), codes[first:last].numpy(), *levels, order.numpy(), row, rounding)

        return restore

    def restores_compiled(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2

    def check_weights(self) -> list[CheckWeight]:
        return [weight for weight in _check_weights() if not (self._rounds and MINIMUMS in weight[1])]


def contiguous_rows(published: Parts) -> dict[str, torch.Tensor]:
    """The same parts, each [n, rows, ...]. Raises Unencodable for other dimensions, NaN and infinity."""
    for name, part in published.items():
        if part.dim() != 3:
            raise Unencodable(f"{name} of a weight are {part.dtype} {list(part.shape)}, not rows")
        if part.is_floating_point() and not bool(part.isfinite().all()):
            raise Unencodable(f"{name} of a weight hold NaN or infinity")
    return {name: part.contiguous() for name, part in published.items()}


def described_bits(encoding: str, full: Shapes, native: Shapes) -> str:
    """The name of an encoding, with the bits of these parameters' codes in these tensors."""
    bits = set()
    for name, (_, shape) in full.items():
        if (codes := native.get(f"{name}.{CODES}")) is not None:
            bits.add(8 * codes[1][1] // shape[1])
    return f"{encoding} of {' and '.join(map(str, sorted(bits)))} bits"


def packed_rows(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes, uint8 [..., columns * bits / 8], of numbers, uint8 [..., columns], that fit into so many bits.

    The bits of a number are divided into widths of 8, 4, 2 or 1, each of which is there at most once: the lowest are
    the widest. A row has all parts of one width next to each other. Each place in its bytes, the lowest bits first, is
    a run of neighbouring columns. So both reading and writing pass over neighbours. Raises Unencodable.
    """
    columns, found, low = numbers.shape[-1], [], 0
    if columns % (8 // _planes(bits)[-1]):
        raise Unencodable(f"a weight has {columns} columns, which {bits} bits cannot be packed in")
    if bits < 8 and numbers.numel() and int(numbers.max()) >> bits:
        raise Unencodable(f"a weight has the number {int(numbers.max())}, which {bits} bits cannot hold")
    for width in _planes(bits):
        runs = (numbers >> low & (1 << width) - 1).unflatten(-1, (8 // width, -1))
        packed = runs[..., 0, :]
        for place in range(1, 8 // width):
            packed = packed | runs[..., place, :] << width * place
        found.append(packed)
        low += width
    return torch.cat(found, dim=-1)


def _planes(bits: int) -> list[int]:
    return [width for width in _WIDTHS if bits & width]


def _rows_at_once(rows: int, columns: int, piece: int) -> int:
    return min(max(piece // max(columns, 1), 1), rows)


def _fits_level(rows: int, columns: int, parts: Shapes, name: str) -> bool:
    """Whether scales or minimums are floats, or multiples of units of some groups together."""
    (kind, shape), units, groups = parts[name], parts.get(_UNITS[name]), parts[SCALES][1][1]
    if shape != (rows, groups):
        return False
    if units is None:
        return kind in _FLOATS
    few = units[1]
    steps = _STEPS if name == SCALES else ("uint8",)
    fits = few[0] == rows and groups % few[1] == 0 and 2 * few[1] <= columns
    return kind in steps and units[0] == "float16" and fits and ORDER not in parts


def _fits_order(rows: int, columns: int, parts: Shapes) -> bool:
    kind, (matrices, each) = parts[ORDER]
    return kind == "int16" and each == columns and rows % matrices == 0 and parts[SCALES][1][1] <= _MOST_GROUPS


def _matrices(target: torch.Tensor, parts: Parts) -> Iterator[tuple[torch.Tensor, Parts]]:
    """The matrices of a weight that have an order of their own, one after the other."""
    count = len(parts[ORDER]) if ORDER in parts else 1
    if count == 1:
        yield target, parts
        return
    codes = parts[CODES].view(len(target), -1)
    divided = {name: part.chunk(count) for name, part in {**parts, CODES: codes}.items()}
    for number, matrix in enumerate(target.chunk(count)):
        yield matrix, {name: chunks[number] for name, chunks in divided.items()}


def _levels(target: torch.Tensor, parts: Parts, scratch: torch.Tensor) -> Iterator[tuple[int, int, list[Any], Any]]:
    """Rows from one to another of a matrix, their scales, zeros and minimums in float32 (empty where there are none),
    and scratch for a row. All as numpy has them, and valid until the next ones."""
    (rows, columns), groups = target.shape, parts[SCALES].shape[1]
    step = min(max((len(scratch) - 9 * columns) // (4 * 4 * groups), 1), rows)
    each = 4 * step * groups
    room = first_bytes(scratch, 9 * columns + 4 * each)
    levels = [one.view(torch.float32) for one in room[: 4 * each].split(each)]
    values, offsets = room[4 * each : 4 * each + 8 * columns].view(torch.float32).split(columns)
    row = values.numpy(), offsets.numpy(), room[4 * each + 8 * columns :].numpy()
    none = torch.empty((0, 0), dtype=torch.float32).numpy()
    for first in range(0, rows, step):
        last = min(first + step, rows)
        some = {name: part[first:last] for name, part in parts.items() if name not in (CODES, ORDER)}
        found: list[Any] = []
        for number, name in enumerate((SCALES, ZEROS, MINIMUMS)):
            if name not in parts:
                found.append(none)
                continue
            value = _level(name, some, None, levels[number], room[3 * each : 4 * each])
            found.append((value.neg_() if MINIMUM_UNITS in parts and name == MINIMUMS else value).squeeze(-1).numpy())
        yield first, last, found, row


def _copy_numbers(target: torch.Tensor, codes: torch.Tensor, bits: int, scratch: torch.Tensor) -> None:
    """The numbers of packed rows. `scratch`: uint8, two for each number."""
    if bits == 8:
        target.copy_(codes)
        return
    (rows, columns), start, low = target.shape, 0, 0
    numbers, rest = scratch[: 2 * target.numel()].split(target.numel())
    numbers = numbers.view(rows, columns)
    for width in _planes(bits):
        count = columns * width // 8
        some = rest[: rows * count].view(rows, count)
        for place, run in enumerate(numbers.split(count, dim=1)):
            torch.bitwise_right_shift(codes[:, start : start + count], width * place, out=some)
            some.bitwise_and_((1 << width) - 1)
            if low:
                run.bitwise_or_(some.bitwise_left_shift_(low))
            else:
                run.copy_(some)
        start, low = start + count, low + width
    target.copy_(numbers)


def _level(
    name: str, parts: Parts, order: torch.Tensor | None, factors: torch.Tensor, scratch: torch.Tensor
) -> torch.Tensor:
    """Scales, zeros or minimums in float32 [rows, groups, 1], or [rows, columns, 1] in this order."""
    values = parts[name]
    rows, groups = values.shape
    if order is not None:
        shape, room = (rows, len(order)), rows * len(order)
        found = factors[:room].view(shape)
        if values.dtype == torch.float32:
            torch.index_select(values, 1, order, out=found)
        else:
            some = scratch[: room * values.itemsize].view(values.dtype).view(shape)
            found.copy_(torch.index_select(values, 1, order, out=some))
        return found.unsqueeze(-1)
    found = factors[: values.numel()].view(rows, groups).copy_(values)
    if (units := parts.get(_UNITS.get(name, ""))) is not None:
        wide = scratch[: 4 * units.numel()].view(torch.float32).view(units.shape).copy_(units)
        found.view(*units.shape, -1).mul_(wide.unsqueeze(-1))
    return found.unsqueeze(-1)


def _check_weights() -> Iterator[CheckWeight]:
    """Every number with scales from the least to the largest, in each dtype of scales and each number of bits."""
    halves = torch.arange(1 << 16, dtype=torch.int32)[::13].to(torch.uint16).view(torch.float16)
    halves = halves[halves.isfinite()]
    halves = halves[: len(halves) // 32 * 32].view(-1, 8)
    powers = torch.cat((torch.arange(-149, 119), torch.linspace(-140.0, 110.0, 244, dtype=torch.float32)))
    wide = powers.exp2().view(-1, 8) * torch.tensor([1.0, -1.0]).repeat(4)
    random = torch.Generator().manual_seed(0)
    for number, scales in enumerate((halves, wide, wide.bfloat16(), halves, halves, halves, wide, halves)):
        bits = (4, 4, 4, 8, 5, 6, 8, 3)[number]
        rows, columns = len(scales), 8 * 40
        numbers = (torch.arange(rows * columns) * 7 % (1 << bits)).to(torch.uint8).view(rows, columns)
        parts = {CODES: packed_rows(numbers, bits), SCALES: scales}
        if number % 2:
            parts[ZEROS] = torch.randint(0, 1 << bits, scales.shape, dtype=torch.uint8, generator=random)
        if number in (4, 6):
            parts[MINIMUMS] = scales.roll(3, 0)
        if number in (1, 3):
            parts[ORDER] = torch.randint(0, 8, (number + 1, columns), generator=random).to(torch.int16)
            rows = rows // (number + 1) * (number + 1)
            parts = {name: part if name == ORDER else part[:rows] for name, part in parts.items()}
        yield (rows, columns), parts
    steps = torch.randint(0, 64, halves.shape, dtype=torch.uint8, generator=random)
    units = {SCALE_UNITS: halves[:, :2].contiguous(), MINIMUM_UNITS: halves[:, 2:4].contiguous()}
    numbers = torch.randint(0, 16, (len(halves), 320), dtype=torch.uint8, generator=random)
    yield (len(halves), 320), {CODES: packed_rows(numbers, 4), SCALES: steps, MINIMUMS: steps.roll(1), **units}
    signed = {SCALES: (steps.int() * 4 - 128).to(torch.int8), SCALE_UNITS: units[SCALE_UNITS]}
    yield (len(halves), 320), {CODES: packed_rows(numbers, 4), **signed}
