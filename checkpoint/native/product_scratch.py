"""Scratch memory of `routines.mxfp4_product`, where it is allocated and where it is used."""

from __future__ import annotations

PAIRS = 720
"""Pairs of columns that are summed up at a time: their sums stay in the first cache."""

SUMS = 6
"""Of each pair: of both columns the sum, and those of even and of odd rows."""

PRODUCT_SCRATCH = 4 * SUMS * PAIRS
"""Bytes, for each thread."""
