"""Scratch memory of products with MXFP4 that have the bits of torch, where it is allocated and where it is used."""

from __future__ import annotations

PAIRS = 720
"""Pairs of columns that are summed up at a time: their sums stay in the first cache."""

SUMS = 6
"""Of each pair: of both columns the sum, and those of even and of odd rows."""

PRODUCT_SCRATCH = 4 * SUMS * PAIRS
"""Bytes, for each thread, of `routines.mxfp4_product`."""

TILE = 16
"""Pairs of columns that `mxfp4_routines.mxfp4_in_four_sums` multiplies at once."""

TURNED = 64
"""Outputs whose values `mxfp4_turning.restore_turned` turns together."""


def four_sums_scratch(pairs: int) -> int:
    """Bytes, for each thread, of `mxfp4_routines.mxfp4_in_four_sums` with so many pairs of columns."""
    return 4 * 4 * 2 * (pairs + TILE)
