"""Products of one row with an encoded weight that is not restored: what a decoded token takes of an expert.

The weight, two to four times as large when it is restored, is neither written to memory nor read from it again. Used
only where a comparison, once for a shape and number of threads, finds the bits of the product with the restored weight.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from checkpoint import float_tiles
from checkpoint.native.encoding import CODES, SCALES, Encoding, first_bytes
from checkpoint.native.mxfp4 import BLOCK, Mxfp4
from checkpoint.native.product_scratch import PAIRS, PRODUCT_SCRATCH, SUMS, TILE, four_sums_scratch
from checkpoint.native.routine_check import first_use
from checkpoint.native.threads import in_shares

Parameters = dict[str, torch.Tensor]

_INSTEAD = "single rows are multiplied with restored experts, which takes about twice as long"

_lock = threading.Lock()
_equal: dict[tuple[int, int, int], bool] = {}
"""Rows and columns of a weight, and threads: whether its products are equal."""


class OutOfRangeError(ArithmeticError):
    """Another order of rounding could show in this product."""


class EncodedProducts:
    """Products with the weights [in, out] of one MXFP4 expert at a time, in bfloat16. For one thread at a time.

    `scratch`: uint8 [threads, n], see `Encoding.scratch_for`.
    """

    def __init__(self, scratch: torch.Tensor) -> None:
        self._scratch = scratch
        self.expert: Parameters = {}
        """The tensors of the expert's blob."""

    def are_equal(self, shapes: Iterable[tuple[int, int]]) -> bool:
        """Whether products with weights of these shapes have the bits of those with restored weights. The first
        question compiles the product, which takes about half a second."""
        return all(is_equal(shape, self._scratch) for shape in shapes)

    def bind(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """The product with a weight of `expert`, bias included: [1, in] -> [1, out]. It raises OutOfRangeError."""

        def product(row: torch.Tensor) -> torch.Tensor:
            found = multiply(row, self.expert[f"{name}.{CODES}"], self.expert[f"{name}.{SCALES}"], self._scratch)
            bias = self.expert.get(f"{name}_bias")
            return found if bias is None else found + bias

        return product


def are_possible(encoding: Encoding, dtype: torch.dtype, device: str) -> bool:
    """Whether single rows can be multiplied with this encoding: where its compiled routine is right, and the order in
    which the CPU's products are added is known: that of AMX, or that of torch on a CPU without products in bfloat16."""
    if not isinstance(encoding, Mxfp4) or device != "cpu" or not (_has_amx() or _has_four_sums()):
        return False
    return encoding.checked_routine(dtype) is not None


def _has_amx() -> bool:
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


def _has_four_sums() -> bool:
    return float_tiles.is_faster() and bool(torch.cpu.get_capabilities().get("avx2"))


def multiply(row: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """[1, in] times a weight of MXFP4 [in, out]: [1, out], on as many threads as `scratch` has rows.

    Raises OutOfRangeError.
    """
    row = row.contiguous()
    if not _is_in_range(row, scales):
        raise OutOfRangeError
    inputs, columns = row.shape[1], scales.shape[1]
    found = torch.empty(1, columns, dtype=torch.bfloat16)
    target, pairs = found.view(torch.uint16).view(-1).numpy(), codes.view(inputs, columns // 2).numpy()
    run = _in_order_of_amx(row, scratch) if _has_amx() else _in_four_sums(row, scratch)
    in_shares(partial(run, target, pairs, scales.numpy()), columns // 2, len(scratch), TILE)
    return found


_Run = Callable[[Any, Any, Any, int, int, int], None]
"""(found, codes, scales, thread, first and last pair of columns)"""


def _in_order_of_amx(row: torch.Tensor, scratch: torch.Tensor) -> _Run:
    from checkpoint.native import routines  # loads numba: not before it is needed

    given = row.view(torch.uint16).view(-1).numpy()

    def run(found: Any, codes: Any, scales: Any, thread: int, first: int, last: int) -> None:
        sums = first_bytes(scratch[thread], PRODUCT_SCRATCH).view(torch.float32).view(SUMS, PAIRS).numpy()
        routines.mxfp4_product(found, given, codes, scales, sums, first, last)

    return run


def _in_four_sums(row: torch.Tensor, scratch: torch.Tensor) -> _Run:
    from checkpoint.native.mxfp4_routines import mxfp4_in_four_sums  # loads numba: not before it is needed

    given, product = row.float().view(-1).numpy(), mxfp4_in_four_sums()

    def run(found: Any, codes: Any, scales: Any, thread: int, first: int, last: int) -> None:
        sums = first_bytes(scratch[thread], four_sums_scratch(last - first)).view(torch.float32).numpy()
        product(found, given, codes, scales, sums, first, last)

    return run


def _is_in_range(row: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether no product or sum is subnormal, which AMX would take as zero, or infinite: the row is in bfloat16, each
    number of it zero or of 2^-40 to 2^40, and scales are 2^-60 to 2^60."""
    if row.dtype is not torch.bfloat16:
        return False
    bits, grid = row.view(torch.int16).numpy(), scales.numpy()
    exponents = bits >> 7 & 0xFF
    inside = (exponents >= 87) & (exponents <= 167) | (bits & 0x7FFF == 0)
    return bool(inside.all()) and int(grid.min()) >= 67 and int(grid.max()) <= 187


def is_equal(shape: tuple[int, int], scratch: torch.Tensor) -> bool:
    """Whether products with weights of this shape, by this number of threads, have the bits of those with restored
    ones. The first question finds out: it makes two weights."""
    key = (*shape, torch.get_num_threads())
    with _lock:
        if key not in _equal:
            fits = shape[0] % BLOCK == 0 and shape[1] % 2 == 0 and (_has_amx() or shape[1] >= 2 * TILE)
            _equal[key] = fits and bool(first_use(lambda: _compared(shape, scratch), _INSTEAD))
        return _equal[key]


def _compared(shape: tuple[int, int], scratch: torch.Tensor) -> bool:
    """With random numbers, and with sums that cancel to zero in exact arithmetic, where the result is nothing but the
    order's rounding error (see `checkpoint.kernels.probes`)."""
    rows, columns = shape
    generator = torch.Generator().manual_seed(0)
    # So wide a range that sums are rounded at each step: a product with a value of MXFP4 has 10 bits.
    row = torch.randn(1, rows, generator=generator) * torch.randint(-12, 13, (1, rows), generator=generator).exp2()
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 130, (rows // BLOCK, columns), dtype=torch.uint8, generator=generator)
    if not _same(row, codes, scales, scratch):
        return False
    first, second = torch.randperm(rows, generator=generator).chunk(2)
    codes[second] = codes[first] ^ 0x88  # the signs
    row[:, second] = row[:, first]
    return _same(row, codes, scales[:1].expand_as(scales).contiguous(), scratch)


def _same(row: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, scratch: torch.Tensor) -> bool:
    rows, columns = codes.shape[0], scales.shape[1]
    weight, row = torch.empty(rows, columns, dtype=torch.bfloat16), row.to(torch.bfloat16)
    Mxfp4().restore_into({"weight": weight}, {f"weight.{CODES}": codes, f"weight.{SCALES}": scales}, scratch)
    found = multiply(row, codes.view(-1), scales, scratch)
    return torch.equal(found.view(torch.int16), (row @ weight).view(torch.int16))
