"""MXFP4: numbers of 4 bits (E2M1), and a power of two (E8M0) for each block of 32.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3 and 6.3. gpt-oss publishes a weight [out, in] with
its blocks along `in`, and Transformers dequantises it to [in, out]. Here the codes are in that order: a lookup of 16
bits gives four values that are next to each other, and a row of scales multiplies 32 rows.
"""

from __future__ import annotations

import math
from functools import cache

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
    rows_at_once,
)
from checkpoint.native.product_scratch import PRODUCT_SCRATCH, four_sums_scratch
from checkpoint.native.routine_check import Routine

BLOCK = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes 0 to 7. Those of 8 to 15 are the same with a minus, -0.0 too."""

_NAN = 255
"""As a scale."""

_PER_WORD = 4
_LEAST_SCALE = 0x40
"""2^-127, the E8M0 scale 0, in bfloat16."""


class Mxfp4(Encoding):
    """Codes: uint8 [in * out / 2] of a weight [in, out], the earlier value in the low bits; scales: uint8
    [in / 32, out].

    A value times its scale is exact in bfloat16, which has room for both ends of the scale. Other dtypes are rounded
    from that, once, as Transformers rounds.
    """

    name = "mxfp4"
    table_bytes = 8 << 16
    inputs_first = True

    def encode(self, published: Parts) -> dict[str, torch.Tensor]:
        """Codes: uint8 [n, out, in / 32, 16], the earlier value in the low bits; scales: uint8, one a block."""
        numbers, scales = published[CODES], published[SCALES]
        if numbers.dim() != 4 or numbers.shape[-1] != BLOCK // 2 or numbers.shape[:-1] != scales.shape:
            raise Unencodable(f"blocks {list(numbers.shape)} and scales {list(scales.shape)} are not those of MXFP4")
        if numbers.dtype != torch.uint8 or scales.dtype != torch.uint8:
            raise Unencodable(f"blocks and scales are {numbers.dtype} and {scales.dtype}, not uint8")
        if bool((scales == _NAN).any()):
            raise Unencodable("a scale is NaN")
        count, out = numbers.shape[:2]
        inputs = numbers.reshape(count, out, -1).transpose(1, 2).contiguous()  # [n, in / 2, out]: each has two of `in`
        values = torch.empty((count, inputs.shape[1], 2, out), dtype=torch.uint8)
        torch.bitwise_and(inputs, 15, out=values[:, :, 0])
        torch.bitwise_right_shift(inputs, 4, out=values[:, :, 1])
        pairs = values.view(count, -1, 2)
        return {CODES: pairs[..., 0] | pairs[..., 1] << 4, SCALES: scales.transpose(1, 2).contiguous()}

    def fits_weight(self, shape: tuple[int, ...], parts: Shapes) -> bool:
        if len(shape) != 2 or shape[0] % BLOCK:
            return False
        codes, scales = ("uint8", (math.prod(shape) // 2,)), ("uint8", (shape[0] // BLOCK, shape[1]))
        return parts == {CODES: codes, SCALES: scales}

    def scratch_bytes(self, shape: tuple[int, ...], piece: int) -> int:
        rows, columns = shape
        count = rows_at_once(rows, BLOCK, columns, piece, _PER_WORD) * columns
        restoring = 2 * count + count // _PER_WORD * 4 + rows // BLOCK * columns * 2
        return max(restoring, PRODUCT_SCRATCH, four_sums_scratch(columns // 2))

    def restore(self, target: torch.Tensor, parts: Parts, scratch: torch.Tensor, piece: int) -> None:
        codes, scales = parts[CODES], parts[SCALES]
        rows, columns = target.shape
        step = rows_at_once(rows, BLOCK, columns, piece, _PER_WORD)
        lookup, words = values_of_words(target.device), codes.view(torch.uint16)
        count = step * columns
        values = scratch[: 2 * count].view(torch.bfloat16)
        places = scratch[2 * count :][: count // _PER_WORD * 4].view(torch.int32)
        factors = scratch[3 * count :][: 2 * scales.numel()].view(torch.int16).view(scales.shape)
        factors.copy_(scales).bitwise_left_shift_(7).clamp_(min=_LEAST_SCALE)  # a bfloat16 with this exponent
        blocks = max(step // BLOCK, 1)
        of_blocks = factors.view(torch.bfloat16).unsqueeze(1).split(blocks)
        of_words = words.split(count // _PER_WORD)
        for number, part in enumerate(target.split(step)):
            if part.numel() < count:
                places, values = places[: part.numel() // _PER_WORD], values[: part.numel()]
            places.copy_(of_words[number])
            torch.index_select(lookup, 0, places, out=values.view(torch.int64))
            factor = of_blocks[number * step // BLOCK // blocks]
            found, part = values.view(len(factor), -1, columns), part.view(len(factor), -1, columns)
            if part.dtype == found.dtype:
                torch.mul(found, factor, out=part)
            else:
                part.copy_(found.mul_(factor))

    def routine(self, dtype: torch.dtype = torch.bfloat16) -> Routine:
        from checkpoint.native import routines  # loads numba: not before an expert is to be restored

        table = bits_of_values().numpy()

        def restore(target: torch.Tensor, parts: Parts, scratch: torch.Tensor) -> None:
            codes, scales = parts[CODES], parts[SCALES]
            rows, columns = target.shape
            factors = first_bytes(scratch, 2 * columns).view(torch.uint32)
            of_rows = codes.view(rows, columns // 2)
            routines.mxfp4(target.view(torch.uint32).numpy(), of_rows.numpy(), scales.numpy(), factors.numpy(), table)

        return restore

    def restores_compiled(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and shape[1] % 2 == 0

    def check_weights(self) -> list[CheckWeight]:
        scales = torch.arange(_NAN, dtype=torch.uint8).repeat(2)
        grid = torch.stack((scales, scales % 40 + 100, scales.roll(1)))
        shape = (BLOCK * len(grid), len(scales))
        places = torch.arange(shape[0]).unsqueeze(1) + torch.arange(shape[1])  # all numbers in each block
        values = (places % 16).to(torch.uint8).view(-1, 2)
        return [(shape, {CODES: values[:, 0] | values[:, 1] << 4, SCALES: grid})]


def bits_of_values() -> torch.Tensor:
    """The bits of all values times all scales, in bfloat16: uint16 [256, 16]."""
    codes = torch.arange(16, dtype=torch.uint8)
    values = values_of_words(codes.device).view(torch.bfloat16).view(-1, _PER_WORD)[: len(codes), 0]
    factors = (torch.arange(256, dtype=torch.int16) << 7).clamp(min=_LEAST_SCALE).view(torch.bfloat16)
    return (values * factors.unsqueeze(1)).view(torch.uint16)


@cache
def values_of_words(device: torch.device) -> torch.Tensor:
    """For each word of 16 bits its four values: bfloat16 [65536, 4] as int64 [65536], 512 KiB."""
    values = torch.tensor([sign * value for sign in (1.0, -1.0) for value in VALUES], dtype=torch.bfloat16)
    words = torch.arange(1 << 16)
    four = torch.stack([values[words >> 4 * place & 15] for place in range(_PER_WORD)], dim=1)
    return four.view(torch.int64).view(-1).to(device)
