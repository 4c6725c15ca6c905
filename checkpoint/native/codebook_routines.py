"""Compiled routines that restore rows of codes with a table and group scales (`checkpoint/native/codebook.py`).

See `checkpoint/native/routines.py` for why and how they are compiled.
"""

from __future__ import annotations

from typing import Any

from numba import float32

from checkpoint.native.integer_routines import (
    EXACT,
    TO_BFLOAT,
    TO_HALF,
    _as_bfloat,
    _as_half,
    _half_bits,
    _unpack,
)
from checkpoint.native.routines import _rounded, _unchanged, compiled

__all__ = ["EXACT", "TO_BFLOAT", "TO_HALF", "codebook_in_bfloat16", "codebook_in_float16", "codebook_in_float32"]


def _restorer(converted: Any) -> Any:
    """Of weights whose values are `converted` from float32."""

    @compiled
    def restore(
        target: Any,
        codes: Any,
        scales: Any,
        minimums: Any,
        table: Any,
        factor: float,
        rounding: int,
        row_scratch: Any,
    ) -> None:
        """target: [rows, columns]; codes: uint8 [rows, bytes]; scales, and minimums where they are not empty: float32
        [rows, groups]; table: float32, as long as the codes' bits say. `row_scratch`: a float32 and a uint8 a column.
        Products are rounded, see `Codebook`, before they are multiplied by the factor."""
        values, numbers = row_scratch
        columns, groups, last = len(numbers), scales.shape[1], float32(factor)
        bits, width = 8 * codes.shape[1] // columns, columns // groups
        for row in range(len(target)):
            found = target[row]
            _unpack(numbers, codes[row], bits)
            for group in range(groups):
                scale = scales[row, group]
                least = minimums[row, group] if len(minimums) else float32(0.0)
                for column in range(group * width, (group + 1) * width):
                    values[column] = float32(table[numbers[column]] * scale) - least
            if rounding == TO_HALF:
                for column in range(columns):
                    values[column] = _as_half(values[column])
            elif rounding == TO_BFLOAT:
                for column in range(columns):
                    values[column] = _as_bfloat(values[column])
            for column in range(columns):
                found[column] = converted(float32(values[column] * last))

    return restore


codebook_in_bfloat16 = _restorer(_rounded)
codebook_in_float16 = _restorer(_half_bits)
codebook_in_float32 = _restorer(_unchanged)
