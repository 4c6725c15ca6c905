"""Compiled tasks that multiply rows with several weights in one hand-over; see `checkpoint/native/row_products.py`.

Threads take shares of the outputs, one after the other, until none are left: a thread that comes late takes fewer. All
that a task needs is in an array of integers, sizes and addresses, so that a call costs no conversion of arrays.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, types
from numba.extending import intrinsic

from checkpoint.native.routines import compiled
from checkpoint.native.row_routines import WEIGHT_ROWS, fp8_product, integer_product, quantiser

FIELDS = 18
(
    COUNTER,
    THREADS,
    SHARES,
    SHARES_OF_PRODUCT,
    SHARE,
    OUTPUTS,
    PRODUCTS,
    FOUND,
    GIVEN,
    ROWS,
    INPUTS,
    STEPS,
    SUMS,
    COLUMNS,
    CHUNKS,
    GROUPS,
    SCRATCH,
    SCRATCH_BYTES,
) = range(FIELDS)
"""Of a call. Two counters: of shares that were taken, and of threads. SHARE: outputs of one. Addresses of PRODUCTS
(int64 [n, 4]), of what is FOUND (float32 [.., outputs]), of the rows that are GIVEN, how many ROWS, of INPUTS, STEPS
and SUMS as `quantise` makes them, and of SCRATCH, of which each thread has some bytes."""

WEIGHT, ROW, FOUND_ROW, COUNT = range(4)
"""Of a product: the address of the weight's fields, its first row of inputs and of what is found, and how many."""

WEIGHT_FIELDS = 8
CODES, CODE_BYTES, LEVELS, UNITS, FEW, OTHER, OTHER_UNITS, OTHER_FEW = range(WEIGHT_FIELDS)
"""Of a weight: addresses of codes, scales and units, and of zeros or minimums and units; how many bytes of codes and
units a row has. In `CODE_BYTES`, other encodings have the height of their grid of scales."""


@intrinsic
def _next(_context: Any, _address: Any) -> Any:
    """The number at an address, which is then one more, whichever thread asks."""

    def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.int64), generate


@intrinsic
def _pointer(_context: Any, _address: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


def _task(product: Any) -> Any:
    """`product(call, weight, place, first, last, scratch)`: fields, the outputs to compute, and an address."""

    @cfunc(types.void(types.voidptr), error_model="numpy")
    def task(address: Any) -> None:
        call = carray(address, FIELDS, np.int64)
        shares, each, share, outputs = call[SHARES], call[SHARES_OF_PRODUCT], call[SHARE], call[OUTPUTS]
        counters = call.ctypes.data
        scratch = call[SCRATCH] + _next(counters + 8 * THREADS) * call[SCRATCH_BYTES]
        while True:
            number = _next(counters + 8 * COUNTER)
            if number >= shares:
                return
            place = carray(_pointer(call[PRODUCTS] + number // each * 32), 4, np.int64)
            weight = carray(_pointer(place[WEIGHT]), WEIGHT_FIELDS, np.int64)
            first = number % each * share
            product(call, weight, place, first, min(first + share, outputs), scratch)

    return task


@compiled
def _found(call: Any, place: Any) -> Any:
    at = call[FOUND] + place[FOUND_ROW] * call[OUTPUTS] * 4
    return carray(_pointer(at), (place[COUNT], call[OUTPUTS]), np.float32)


@compiled
def _quantised(call: Any, place: Any) -> Any:
    row, count = place[ROW], place[COUNT]
    columns, chunks, groups = call[COLUMNS], call[CHUNKS], call[GROUPS]
    return (
        carray(_pointer(call[INPUTS] + row * columns * 2), (count, columns), np.int16),
        carray(_pointer(call[STEPS] + row * chunks * 4), (count, chunks), np.float32),
        carray(_pointer(call[SUMS] + row * groups * 4), (count, groups), np.float32),
    )


@cache
def integer_task(bits: int, scales: tuple[str, str], offsets: str, other: tuple[str, str], width: int) -> Any:
    """Of `integer_product`. `scales`, `other`: the kind, and the dtype of numpy that holds them."""
    product = integer_product(bits, scales[0], offsets, other[0], width)
    of_scales, of_other = (getattr(np, held) for _, held in (scales, other))

    @compiled
    def multiply(call: Any, weight: Any, place: Any, first: int, last: int, scratch: int) -> None:
        outputs, columns, groups = call[OUTPUTS], call[COLUMNS], call[GROUPS]
        levels = outputs * groups
        own = (
            carray(_pointer(scratch), columns, np.uint8),
            carray(_pointer(scratch + columns), WEIGHT_ROWS * groups, np.float32),
            carray(_pointer(scratch + columns + WEIGHT_ROWS * groups * 4), WEIGHT_ROWS * groups, np.float32),
        )
        codes = carray(_pointer(weight[CODES]), (outputs, weight[CODE_BYTES]), np.uint8)
        scale = (
            carray(_pointer(weight[LEVELS]), levels, of_scales),
            carray(_pointer(weight[UNITS]), (outputs, weight[FEW]), np.uint16),
        )
        less = (
            carray(_pointer(weight[OTHER]), levels, of_other),
            carray(_pointer(weight[OTHER_UNITS]), (outputs, weight[OTHER_FEW]), np.uint16),
        )
        product(_found(call, place), _quantised(call, place), codes, scale, less, first, last, own)

    return _task(multiply)


@cache
def fp8_task() -> Any:
    """Of `fp8_product`."""
    product = fp8_product()

    @compiled
    def multiply(call: Any, weight: Any, place: Any, first: int, last: int, scratch: int) -> None:
        outputs, columns, chunks = call[OUTPUTS], call[COLUMNS], call[CHUNKS]
        inputs = carray(_pointer(call[INPUTS] + place[ROW] * columns * 4), (place[COUNT], columns), np.float32)
        codes = carray(_pointer(weight[CODES]), (outputs, columns), np.uint8)
        scales = carray(_pointer(weight[LEVELS]), (weight[CODE_BYTES], chunks), np.float32)
        own = carray(_pointer(scratch), chunks, np.float32)
        product(_found(call, place), inputs, codes, scales, first, last, own)

    return _task(multiply)


@cache
def mxfp4_task() -> Any:
    """Of `mxfp4_product`."""
    from checkpoint.native import mxfp4_routines as routines

    product, rows, room = routines.mxfp4_product(), routines.ROWS, 2 * routines.WIDE

    @compiled
    def multiply(call: Any, weight: Any, place: Any, first: int, last: int, scratch: int) -> None:
        outputs, columns, chunks = call[OUTPUTS], call[COLUMNS], call[CHUNKS]
        inputs, steps, _ = _quantised(call, place)
        codes = carray(_pointer(weight[CODES]), (columns, outputs // 2), np.uint8)
        scales = carray(_pointer(weight[LEVELS]), (chunks, outputs), np.uint8)
        own = carray(_pointer(scratch), rows * (last - first + room), np.float32)
        product(_found(call, place), inputs, steps, codes, scales, first, last, own)

    return _task(multiply)


@cache
def quantising_task(dtype: str, in_planes: bool) -> Any:
    """Makes a call's inputs, steps and sums of its rows, of this dtype of 16 bits, see `row_routines.quantiser`."""
    quantise = quantiser(dtype, in_planes)
    planes, held = (2, np.int8) if in_planes else (1, np.int16)

    @cfunc(types.void(types.voidptr), error_model="numpy")
    def task(address: Any) -> None:
        call = carray(address, FIELDS, np.int64)
        count = call[ROWS]
        rows = carray(_pointer(call[GIVEN]), (count, call[COLUMNS]), np.uint16)
        found = carray(_pointer(call[INPUTS]), (count, planes * call[COLUMNS]), held)
        steps = carray(_pointer(call[STEPS]), (count, call[CHUNKS]), np.float32)
        quantise(rows, found, steps, carray(_pointer(call[SUMS]), (count, call[GROUPS]), np.float32))

    return task
