"""Exact products with a weight [in, out] in bfloat16, on a CPU that has no instructions for them.

Torch takes 30 to 100 times as long: it reads each output's numbers a row of the weight apart. Used where a comparison,
once for a shape, finds the bits of torch.
"""

from __future__ import annotations

import threading

import torch

from checkpoint import float_tiles
from checkpoint.native.routine_check import first_use
from checkpoint.native.threads import in_shares

_INSTEAD = "torch multiplies with weights [in, out], which takes many times as long"
_PROBE_ROWS = (1, 3)
_SEVERAL_COLUMNS = 256
"""Of the weight that several rows are compared with: torch computes each output in the same way."""

_EVEN = 64
"""Of the outputs of a thread there is a multiple."""

_THREAD_BYTES = 1 << 20
"""Of a weight, below which a thread of its own costs more than it saves."""

_lock = threading.Lock()
_equal: dict[torch.Size, bool] = {}


def has_products(weight: torch.Tensor) -> bool:
    """Whether `multiply` has the bits of `rows @ weight` for a weight of this shape. The first question compares."""
    if weight.dtype is not torch.bfloat16 or weight.device.type != "cpu" or not float_tiles.is_faster():
        return False
    with _lock:
        if weight.shape not in _equal:
            _equal[weight.shape] = bool(first_use(lambda: _is_equal(weight.shape), _INSTEAD))
        return _equal[weight.shape]


def multiply(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[n, K], [K, N] -> [n, N], all in bfloat16."""
    from checkpoint.native import inputs_first_routines as routines  # loads numba: not before it is needed

    inputs, outputs = weight.shape
    if rows.dtype is not torch.bfloat16 or rows.shape[1:] != (inputs,):  # compiled routines check no bounds
        raise ValueError(f"rows are {rows.dtype} {list(rows.shape)}; the weight takes bfloat16 [n, {inputs}]")
    found = torch.empty(len(rows), outputs, dtype=torch.bfloat16)
    given = [one.view(torch.uint16).numpy() for one in (found, rows.contiguous(), weight)]
    threads = max(min(torch.get_num_threads(), weight.nbytes // _THREAD_BYTES), 1)

    def run(_: int, first: int, last: int) -> None:
        sums = torch.empty(routines.SUMS * routines.COLUMNS, dtype=torch.float32)
        routines.inputs_first(*given, first, last, sums.numpy())

    in_shares(run, outputs, threads, _EVEN)
    return found


def _is_equal(shape: torch.Size) -> bool:
    """By sums that cancel to zero in exact arithmetic: what is left is the order's rounding error."""
    inputs, outputs = shape
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randperm(inputs, generator=generator)[: inputs // 2 * 2].chunk(2)
    for count in _PROBE_ROWS:
        columns = outputs if count == 1 else min(outputs, _SEVERAL_COLUMNS)
        rows, weight = torch.zeros(count, inputs), torch.zeros(inputs, columns)
        rows[:, first] = rows[:, second] = torch.randn(count, len(first), generator=generator)
        weight[first] = torch.randn(len(first), columns, generator=generator)
        weight[second] = -weight[first]
        probe = rows.to(torch.bfloat16), weight.to(torch.bfloat16)
        if not torch.equal(multiply(*probe).view(torch.int16), (probe[0] @ probe[1]).view(torch.int16)):
            return False
    return True
