"""Products of a few rows with an encoded weight that is not restored: the kernel `fast` for encoded weights.

The encoded bytes are read once, for all rows. Sums are in float32 or exact, in another order than those of the product
with the restored weight, so the last bit may differ; values are not rounded to the weight's dtype before. Each row has
the same bits whatever the other rows are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from checkpoint.family import dtype_name
from checkpoint.native.codebook import TABLE, Codebook
from checkpoint.native.encoding import CODES, SCALES, Encoding, Parts
from checkpoint.native.fp8 import Fp8
from checkpoint.native.integers import MINIMUM_UNITS, MINIMUMS, ORDER, SCALE_UNITS, ZEROS, Integers
from checkpoint.native.mxfp4 import BLOCK, Mxfp4
from checkpoint.native.routine_check import first_use
from checkpoint.native.threads import in_shares

MOST_ROWS = 32
"""With more, restoring the weight costs less than reading its codes for each four of them."""

_LANES = 16
_LARGEST_CHUNK = 256
"""Columns: 8 bits times 16 bits, so many of them, fit into 32."""

_EVEN = 64
"""Of the outputs of a thread there is a multiple, so that tiles of MXFP4 do not overlap."""

_THREAD_BYTES = 1 << 25
"""Encoded bytes for each thread. For fewer a second thread makes a token slower: torch's own threads wait in a loop for
the next product, and take the core from it."""

_ROW_DTYPES = (torch.bfloat16, torch.float16)
_INSTEAD = "experts are restored before they are multiplied, which takes several times as long"

RowProduct = Callable[[torch.Tensor], torch.Tensor]
"""[n, in] -> [n, out], in the rows' dtype; n of 1 to `MOST_ROWS`."""

_lock = threading.Lock()
_compiled: dict[tuple[object, ...], bool] = {}


def row_products(
    encoding: Encoding, shape: tuple[int, int], parts: Parts, dtype: torch.dtype, scratch: RowScratch | None = None
) -> RowProduct | None:
    """The product of rows of `dtype` with a weight [out, in] of these parts, which stay where they are; MXFP4 is
    [in, out], see `Encoding.inputs_first`. None where there is none: then the weight is to be restored.

    `scratch`: may be shared by products that never run at the same time.
    """
    if dtype not in _ROW_DTYPES or any(part.device.type != "cpu" for part in parts.values()):
        return None
    scratch = scratch or RowScratch()
    bound: _Bound | None = None
    if isinstance(encoding, Integers) or (isinstance(encoding, Codebook) and TABLE not in parts):
        bound = _bind_integers(shape, parts, dtype, scratch)
    elif isinstance(encoding, Fp8):
        bound = _bind_fp8(shape, parts, dtype, scratch)
    elif isinstance(encoding, Mxfp4):
        bound = _bind_mxfp4(shape, parts, dtype, scratch)
    inputs, outputs = shape if encoding.inputs_first else reversed(shape)
    if bound is None or not _compiles(bound, inputs, dtype):
        return None
    return partial(_multiply, bound, (dtype, inputs, outputs), sum(part.nbytes for part in parts.values()))


class RowScratch:
    """Scratch memory of products: arrays of numpy by thread and use, each as large as its largest user asked for."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, str], torch.Tensor] = {}

    def array(self, thread: int, use: str, count: int, dtype: torch.dtype = torch.float32) -> Any:
        held = self._held.get((thread, use))
        if held is None or len(held) < count:
            held = self._held[thread, use] = torch.empty(count, dtype=dtype)
        return held[:count].numpy()


class _Bound:
    """The routines of one weight."""

    def __init__(
        self, key: tuple[object, ...], inputs: Callable[[torch.Tensor], Any], run: Callable[..., None]
    ) -> None:
        self.key = key
        """The same for weights whose routines are compiled together."""
        self.inputs = inputs
        """Makes what `run` takes of rows."""
        self.run = run
        """(found float32 [n, out], inputs, thread, first, last)"""


def _multiply(bound: _Bound, sizes: tuple[torch.dtype, int, int], nbytes: int, rows: torch.Tensor) -> torch.Tensor:
    dtype, inputs, outputs = sizes
    if rows.dtype is not dtype or rows.shape[1:] != (inputs,):  # compiled routines check no bounds
        raise ValueError(f"rows are {rows.dtype} {list(rows.shape)}; the weight takes {dtype} [n, {inputs}]")
    found = torch.empty(len(rows), outputs)
    given, target = bound.inputs(rows.contiguous()), found.numpy()
    threads = max(min(torch.get_num_threads(), nbytes // _THREAD_BYTES), 1)
    in_shares(partial(bound.run, target, given), outputs, threads, _EVEN)
    return found.to(rows.dtype)


def _compiles(bound: _Bound, columns: int, dtype: torch.dtype) -> bool:
    """Whether its routines are compiled, which the first question does: it multiplies one row with no outputs."""
    with _lock:
        if bound.key not in _compiled:

            def use() -> bool:
                with torch.inference_mode():
                    bound.run(torch.empty(1, 0).numpy(), bound.inputs(torch.zeros(1, columns, dtype=dtype)), 0, 0, 0)
                return True

            _compiled[bound.key] = bool(first_use(use, _INSTEAD))
        return _compiled[bound.key]


def _bind_integers(shape: tuple[int, int], parts: Parts, dtype: torch.dtype, scratch: RowScratch) -> _Bound | None:
    rows, columns = shape
    groups = parts[SCALES].shape[1]
    width = chunk_width(columns // groups)
    if ORDER in parts or not width:
        return None
    from checkpoint.native import row_routines as routines  # loads numba: not before it is needed

    scale_kind, scale = _levels(parts, SCALES, SCALE_UNITS)
    offset_kind, other, other_kind = routines.MIDDLE, scale, scale_kind
    if MINIMUMS in parts:
        offset_kind, (other_kind, other) = routines.MINIMUMS, _levels(parts, MINIMUMS, MINIMUM_UNITS)
    elif ZEROS in parts:
        offset_kind, other = routines.ZEROS, (parts[ZEROS].view(-1).numpy(), scale[1])
    chunks, name = columns // width, dtype_name(dtype)
    codes = parts[CODES].view(rows, -1).numpy()

    def inputs(given: torch.Tensor) -> tuple[Any, ...]:
        return _quantised(given, name, chunks, groups)

    bits = 8 * codes.shape[1] // columns
    product = routines.integer_product(bits, scale_kind, offset_kind, other_kind)

    def run(found: Any, given: tuple[Any, ...], thread: int, first: int, last: int) -> None:
        own = (
            scratch.array(thread, "numbers", columns, torch.uint8),
            scratch.array(thread, "scales", routines.WEIGHT_ROWS * groups),
            scratch.array(thread, "offsets", routines.WEIGHT_ROWS * groups),
        )
        product(found, given, codes, scale, other, first, last, own)

    return _Bound(("integers", bits, scale_kind, offset_kind, other_kind, name), inputs, run)


def _quantised(rows: torch.Tensor, dtype: str, chunks: int, groups: int) -> tuple[Any, Any, Any]:
    """Rows as integers, a step for each of so many chunks, and sums of groups: see `row_routines.quantiser`."""
    from checkpoint.native.row_routines import quantiser  # loads numba: not before it is needed

    count = len(rows)
    found = torch.empty(rows.shape, dtype=torch.int16).numpy()
    steps, sums = torch.empty(count, chunks).numpy(), torch.empty(count, groups).numpy()
    quantiser(dtype)(rows.view(torch.uint16).numpy(), found, steps, sums)
    return found, steps, sums


def _levels(parts: Parts, name: str, units: str) -> tuple[str, tuple[Any, Any]]:
    """The kind of scales or minimums, see `row_routines.LEVELS`, and their values and units."""
    values = parts[name]
    if units in parts:
        return "steps", (values.view(-1).numpy(), parts[units].view(torch.uint16).numpy())
    none = torch.empty((0, 0), dtype=torch.uint16).numpy()
    raw = values if values.dtype is torch.float32 else values.view(torch.uint16)
    return dtype_name(values.dtype), (raw.view(-1).numpy(), none)


def _bind_fp8(shape: tuple[int, int], parts: Parts, dtype: torch.dtype, scratch: RowScratch) -> _Bound | None:
    rows, columns = shape
    scales = parts[SCALES]
    chunks = scales.shape[1]
    if scales.dtype is not torch.float32 or columns // chunks % _LANES:
        return None
    from checkpoint.native import row_routines as routines  # loads numba: not before it is needed

    codes, levels, name = parts[CODES].view(rows, columns).numpy(), scales.numpy(), dtype_name(dtype)

    def inputs(given: torch.Tensor) -> tuple[Any, ...]:
        return (given.float().numpy(),)

    product = routines.fp8_product()

    def run(found: Any, given: tuple[Any, ...], thread: int, first: int, last: int) -> None:
        product(found, *given, codes, levels, first, last, scratch.array(thread, "scales", chunks))

    return _Bound(("fp8", name), inputs, run)


def _bind_mxfp4(shape: tuple[int, int], parts: Parts, dtype: torch.dtype, scratch: RowScratch) -> _Bound | None:
    inputs, outputs = shape
    if not torch.cpu.get_capabilities().get("avx2"):
        return None
    from checkpoint.native import mxfp4_routines as routines  # loads numba: not before it is needed

    if outputs < 2 * routines.NARROW or outputs % 2:
        return None
    codes, scales = parts[CODES].view(inputs, outputs // 2).numpy(), parts[SCALES].numpy()
    blocks, name = inputs // BLOCK, dtype_name(dtype)

    def quantised(given: torch.Tensor) -> tuple[Any, ...]:
        return _quantised(given, name, blocks, 1)[:2]

    product = routines.mxfp4_product()

    def run(found: Any, given: tuple[Any, ...], thread: int, first: int, last: int) -> None:
        columns = last - first + 2 * routines.WIDE
        product(found, *given, codes, scales, first, last, scratch.array(thread, "columns", routines.ROWS * columns))

    return _Bound(("mxfp4", name), quantised, run)


def chunk_width(group: int) -> int:
    """Columns whose inputs share a scale: the most that divide a group and fit. 0 where none do."""
    return next((n for n in range(min(group, _LARGEST_CHUNK), 0, -1) if group % n == 0 and n % _LANES == 0), 0)
