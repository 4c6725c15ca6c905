"""Experts in fewer bits (checkpoint/forms.py) are restored in one compiled pass on a CPU.

Torch needs six passes over each piece of a weight, and divides each of them among its threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from checkpoint.native.routine_check import checked_routine
from checkpoint.native.threads import together

DTYPES = (torch.bfloat16, torch.float32)
"""Of the weights that a compiled routine restores."""

THREAD_WEIGHTS = 1 << 20
"""A thread restores as many weights or more: for fewer none is woken."""

Weight = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Values [n], which are to be filled; packed [rows, group]; scale and zero [rows * 8 / bits]."""

FormRoutine = Callable[[Weight, int, int], None]
"""Fills what is restored from the rows of `packed` from one number to another."""

_GROUP = 64


def form_routine(bits: int, dtype: torch.dtype, by_torch: Callable[[Weight], None]) -> FormRoutine | None:
    """The compiled routine for weights of `dtype` in so many bits on a CPU.

    None: they are restored `by_torch`, because it gives other bits, cannot be compiled, or is for other dtypes.
    """
    if dtype not in DTYPES:
        return None

    def is_equal(routine: FormRoutine) -> bool:
        return _is_equal(routine, by_torch, bits, dtype)

    return checked_routine(f"int{bits} in {dtype}", partial(_compiled, bits, dtype), is_equal)


def restore_weights(weights: Sequence[Weight], routine: FormRoutine, threads: int) -> None:
    """Fill the values of all weights of an expert, on at most so many threads."""
    threads = max(min(threads, sum(target.numel() for target, *_ in weights) // THREAD_WEIGHTS), 1)

    def restore(number: int) -> None:
        for weight in weights:
            rows = len(weight[1])
            routine(weight, rows * number // threads, rows * (number + 1) // threads)

    if threads == 1:
        restore(0)
    else:
        together([partial(restore, number) for number in range(threads)], with_caller=True)


def _compiled(bits: int, dtype: torch.dtype) -> FormRoutine:
    from checkpoint.native import routines  # loads numba: not before an expert is to be restored

    compiled = {torch.bfloat16: routines.form_in_bfloat16, torch.float32: routines.form_in_float32}[dtype]
    kept = {torch.bfloat16: torch.uint16, torch.float32: torch.float32}[dtype]

    def restore(weight: Weight, first: int, last: int) -> None:
        target, packed, scale, zero = weight
        halves = (one.view(torch.uint16).numpy() for one in (scale, zero))
        compiled(target.view(kept).numpy(), packed.numpy(), *halves, bits, first, last)

    return restore


def _is_equal(routine: FormRoutine, by_torch: Callable[[Weight], None], bits: int, dtype: torch.dtype) -> bool:
    """Whether it gives the bits of `by_torch` for all numbers, with scales and zeros from the least to the largest."""
    scale, zero = check_halves()
    rows = len(scale) * bits // 8
    packed = (torch.arange(rows * _GROUP) * 37 % 256).to(torch.uint8).view(rows, _GROUP)
    found, expected = torch.empty(2, len(scale) * _GROUP - 1, dtype=dtype)  # the last weight is no weight of theirs
    routine((found, packed, scale, zero), 0, rows)
    by_torch((expected, packed, scale, zero))
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def check_halves() -> tuple[torch.Tensor, torch.Tensor]:
    """Finite float16 of all exponents and both signs, subnormal ones too, as scales and as zeros."""
    halves = (torch.arange(1 << 16, dtype=torch.int32)[::7]).to(torch.uint16).view(torch.float16)
    halves = halves[halves.isfinite()]
    halves = halves[: len(halves) // 8 * 8]
    return halves, halves.roll(len(halves) // 3)
