"""Products of a few rows with encoded weights that are not restored: the kernel `fast` for encoded weights.

The encoded bytes are read once, for all rows. Sums are in float32 or exact, in another order than those of the product
with the restored weight, so the last bit may differ; values are not rounded to the weight's dtype before. Each row has
the same bits whatever the other rows are, and whatever thread computes it.

What of a product stays the same is found out when it is bound. A call fills an array of integers, and is handed over to
torch's threads once, for all products that are made together.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from checkpoint.family import dtype_name
from checkpoint.native.codebook import TABLE, Codebook
from checkpoint.native.encoding import CODES, SCALES, Encoding, Parts
from checkpoint.native.fp8 import Fp8
from checkpoint.native.integers import MINIMUM_UNITS, MINIMUMS, ORDER, SCALE_UNITS, ZEROS, Integers
from checkpoint.native.mxfp4 import BLOCK, Mxfp4
from checkpoint.native.routine_check import first_use
from checkpoint.native.team import Task, team_size
from checkpoint.tensors import round_up

MOST_ROWS = 32
"""With more, restoring the weight costs less than reading its codes for each four of them."""

_LANES = 16
_LARGEST_CHUNK = 256
"""Columns: 8 bits times 16 bits, so many of them, fit into 32."""

_EVEN = 64
"""Of the outputs of a share there is a multiple, so that tiles of MXFP4 do not overlap."""

_ROW_DTYPES = (torch.bfloat16, torch.float16)
_INSTEAD = "experts are restored before they are multiplied, which takes several times as long"

_lock = threading.Lock()
_kinds: dict[tuple[object, ...], Kind | None] = {}


Sizes = tuple[int, int, int, int]
"""Inputs, outputs, chunks and groups of inputs. No groups: the inputs are in float32."""


class RowScratch:
    """Scratch memory of products that never run at the same time: as much as the largest asked for."""

    def __init__(self) -> None:
        self._held = torch.empty(0, dtype=torch.uint8)

    def address(self, nbytes: int) -> int:
        """Of at least so many bytes, which stay until the next call."""
        if len(self._held) < nbytes:
            self._held = torch.empty(nbytes, dtype=torch.uint8)
        return self._held.data_ptr()


class Kind:
    """What products have in common that can be made together: the routine, and sizes."""

    def __init__(
        self, task: Any, dtype: torch.dtype, sizes: Sizes, scratch: tuple[int, int], in_planes: bool = False
    ) -> None:
        """`scratch`: bytes of a thread, and for each output of a share. `in_planes`: of inputs, see `row_routines`."""
        self.dtype = dtype
        self.inputs, self.outputs, self.chunks, self.groups = sizes
        self.task = Task(task)
        self.quantiser = _quantiser(dtype_name(dtype), in_planes) if self.groups else None
        self._scratch = scratch

    def share(self, products: int, threads: int) -> int:
        """Outputs that a thread takes at a time. What is read in rows of all outputs is divided as seldom as can be."""
        if not self._scratch[1]:
            return _EVEN
        return round_up(-(-self.outputs // (1 if products % threads == 0 else threads)), _EVEN)

    def scratch_bytes(self, share: int) -> int:
        return round_up(self._scratch[0] + share * self._scratch[1], _EVEN)


@cache
def _quantiser(dtype: str, in_planes: bool) -> Task:
    from checkpoint.native.row_tasks import quantising_task  # loads numba: not before it is needed

    return Task(quantising_task(dtype, in_planes))


class RowProduct:
    """The product of a few rows with one weight: [n, in] -> [n, out], in the rows' dtype; n of 1 to `MOST_ROWS`."""

    def __init__(self, kind: Kind, fields: Sequence[int], parts: Parts, scratch: RowScratch) -> None:
        """`fields`: of the weight, see `row_tasks`. The parts stay where they are."""
        self.kind, self.scratch = kind, scratch
        self.nbytes = sum(part.nbytes for part in parts.values())
        self._parts = parts
        self._fields = array("q", fields)
        self.address = self._fields.buffer_info()[0]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return multiply([self], rows, [len(rows)])


def multiply(products: Sequence[RowProduct], rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Products of one kind, in one hand-over. `counts`: rows of each, one after the other [sum of counts, in], or the
    same rows for all [n, in]. What is found lies one after the other: [sum of counts, out]."""
    first, total = products[0], sum(counts)
    kind, count = first.kind, len(rows)
    if rows.dtype is not kind.dtype or rows.shape[1:] != (kind.inputs,):  # compiled routines check no bounds
        raise ValueError(f"rows are {rows.dtype} {list(rows.shape)}; the weight takes {kind.dtype} [n, {kind.inputs}]")
    are_shared = count != total
    if any(one.kind is not kind for one in products) or (are_shared and any(one != count for one in counts)):
        raise ValueError(f"{count} rows for {len(products)} products of {list(counts)} rows, or these differ in kind")
    given = rows.contiguous() if kind.groups else rows.float().contiguous()
    found = torch.empty(total, kind.outputs, dtype=torch.float32)
    threads = team_size(sum(one.nbytes for one in products))
    places, at = array("q"), 0
    for product, of_product in zip(products, counts, strict=True):
        places.extend((product.address, 0 if are_shared else at, at, of_product))
        at += of_product
    share = kind.share(len(products), threads)
    shares = -(-kind.outputs // share)
    parts = [round_up(count * n, _EVEN) for n in (2 * kind.inputs, 4 * kind.chunks, 4 * kind.groups)]
    each = kind.scratch_bytes(share)
    room = first.scratch.address(sum(parts) + threads * each)
    inputs = room if kind.groups else given.data_ptr()
    ends = room + parts[0], room + parts[0] + parts[1], room + sum(parts)
    call = array(
        "q",
        (
            *(0, 0, shares * len(products), shares, share, kind.outputs, places.buffer_info()[0]),
            *(found.data_ptr(), given.data_ptr(), count, inputs, ends[0], ends[1]),
            *(kind.inputs, kind.chunks, kind.groups, ends[2], each),
        ),
    )
    address = call.buffer_info()[0]
    if kind.quantiser is not None:
        kind.quantiser.run(address, 1)
    kind.task.run(address, threads)
    return found.to(rows.dtype)


Bound = tuple[Kind, tuple[int, ...]]
"""A weight: its kind and fields, see `row_tasks`."""


def row_products(
    encoding: Encoding, shape: tuple[int, int], parts: Parts, dtype: torch.dtype, scratch: RowScratch | None = None
) -> RowProduct | None:
    """The product of rows of `dtype` with a weight of this shape and these parts, which stay where they are: [out, in],
    or [in, out], see `Encoding.inputs_first`. None where there is none: then the weight is to be restored.

    `scratch`: may be shared by products that never run at the same time.
    """
    there = all(part.device.type == "cpu" and part.is_contiguous() for part in parts.values())
    if dtype not in _ROW_DTYPES or not there:
        return None
    shape, bound = encoding.stored_shape(shape), None
    if isinstance(encoding, Integers) or (isinstance(encoding, Codebook) and TABLE not in parts):
        bound = _bind_integers(shape, parts, dtype)
    elif isinstance(encoding, Fp8):
        bound = _bind_fp8(shape, parts, dtype)
    elif isinstance(encoding, Mxfp4):
        bound = _bind_mxfp4(shape, parts, dtype)
    return None if bound is None else RowProduct(*bound, parts, scratch or RowScratch())


def _kind(
    make: Callable[..., Any],
    of: tuple[object, ...],
    dtype: torch.dtype,
    sizes: Sizes,
    scratch: tuple[int, int],
    in_planes: bool = False,
) -> Kind | None:
    """One for all that `make` makes of this. The first question compiles; None where that fails."""
    key = make, of, dtype, sizes
    with _lock:
        if key not in _kinds:
            _kinds[key] = first_use(lambda: Kind(make(*of), dtype, sizes, scratch, in_planes), _INSTEAD)
        return _kinds[key]


def _bind_integers(shape: tuple[int, int], parts: Parts, dtype: torch.dtype) -> Bound | None:
    rows, columns = shape
    groups = parts[SCALES].shape[1]
    width = chunk_width(columns // groups)
    if ORDER in parts or not width:
        return None
    from checkpoint.native import row_routines as routines  # loads numba: not before it is needed
    from checkpoint.native.packed_vectors import has_planes, is_packed
    from checkpoint.native.row_tasks import integer_task

    scales, of_scales = _levels(parts, SCALES, SCALE_UNITS)
    offsets, other, of_other = routines.MIDDLE, scales, of_scales
    if MINIMUMS in parts:
        offsets, (other, of_other) = routines.MINIMUMS, _levels(parts, MINIMUMS, MINIMUM_UNITS)
    elif ZEROS in parts:
        offsets, other, of_other = routines.ZEROS, (scales[0], "uint8"), (parts[ZEROS].data_ptr(), 0, 0)
    chunks, code_bytes = columns // width, parts[CODES].numel() // rows
    bits = 8 * code_bytes // columns
    direct = width if is_packed(bits, width, groups, chunks) else 0
    own = columns + 8 * routines.WEIGHT_ROWS * groups
    of, sizes = (bits, scales, offsets, other, direct), (columns, rows, chunks, groups)
    kind = _kind(integer_task, of, dtype, sizes, (own, 0), direct > 0 and has_planes(direct))
    return None if kind is None else (kind, (parts[CODES].data_ptr(), code_bytes, *of_scales, *of_other))


def _levels(parts: Parts, name: str, units: str) -> tuple[tuple[str, str], tuple[int, int, int]]:
    """Of scales or minimums: the kind, see `row_routines.LEVELS`, and the dtype in which numpy holds them; addresses of
    values and units, and how many units a row has."""
    values = parts[name]
    if units in parts:
        held = dtype_name(values.dtype)
        return ("steps", held), (values.data_ptr(), parts[units].data_ptr(), parts[units].shape[1])
    held = "float32" if values.dtype is torch.float32 else "uint16"
    return (dtype_name(values.dtype), held), (values.data_ptr(), 0, 0)


def _bind_fp8(shape: tuple[int, int], parts: Parts, dtype: torch.dtype) -> Bound | None:
    rows, columns = shape
    scales = parts[SCALES]
    chunks = scales.shape[1]
    if scales.dtype is not torch.float32 or columns // chunks % _LANES:
        return None
    from checkpoint.native.row_tasks import fp8_task  # loads numba: not before it is needed

    kind = _kind(fp8_task, (), dtype, (columns, rows, chunks, 0), (4 * chunks, 0))
    return None if kind is None else (kind, (parts[CODES].data_ptr(), len(scales), scales.data_ptr(), 0, 0, 0, 0, 0))


def _bind_mxfp4(shape: tuple[int, int], parts: Parts, dtype: torch.dtype) -> Bound | None:
    inputs, outputs = shape
    if not torch.cpu.get_capabilities().get("avx2"):
        return None
    from checkpoint.native import mxfp4_routines as routines  # loads numba: not before it is needed
    from checkpoint.native.row_tasks import mxfp4_task

    if outputs < 2 * routines.NARROW or outputs % 2:
        return None
    each = 4 * routines.ROWS
    kind = _kind(mxfp4_task, (), dtype, (inputs, outputs, inputs // BLOCK, 1), (2 * routines.WIDE * each, each))
    return None if kind is None else (kind, (parts[CODES].data_ptr(), 0, parts[SCALES].data_ptr(), 0, 0, 0, 0, 0))


def chunk_width(group: int) -> int:
    """Columns whose inputs share a scale: the most that divide a group and fit. 0 where none do."""
    return next((n for n in range(min(group, _LARGEST_CHUNK), 0, -1) if group % n == 0 and n % _LANES == 0), 0)
