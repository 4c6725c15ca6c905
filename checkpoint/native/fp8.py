"""Block FP8: numbers of 8 bits (E4M3), and one scale for each block of a weight, usually 128 x 128.

Source: DeepSeek-V3 (arXiv:2412.19437), section 3.3.2.
"""

from __future__ import annotations

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
from checkpoint.native.routine_check import Routine

_NAN = 0x7F
"""The code of NaN, without its sign."""

_HALF = 256.0
"""A code's bits, shifted to their places in a float16, are the number divided by this: the exponents' biases are 7 and
15."""

_MOST_SCALE = 2.0**119
_LARGEST_E8M0 = 245
"""The largest E8M0 scale below it, 2^118."""

_SIGN_COPY = 0x4000


class Fp8(Encoding):
    """Codes: uint8 [rows, columns], E4M3. Scales: float32, or uint8 for E8M0, one for each block of a grid.

    A value is the number times its scale in float32, rounded to the weight's dtype, as Transformers dequantises. Torch
    converts E4M3 on CPUs number by number. Shifted to the places of a float16 they are converted twelve at a time.
    """

    name = "fp8"

    def encode(self, published: Parts) -> dict[str, torch.Tensor]:
        """Codes: E4M3 or uint8 [n, rows, columns]; scales: [n, grid rows, grid columns]."""
        numbers, scales = published[CODES], published[SCALES]
        if numbers.dtype not in (torch.float8_e4m3fn, torch.uint8) or numbers.dim() != 3 or scales.dim() != 3:
            raise Unencodable(f"a weight is {numbers.dtype} {list(numbers.shape)}, not blocks of E4M3")
        if any(of % count for of, count in zip(numbers.shape, scales.shape, strict=True)):
            raise Unencodable(f"a grid of {list(scales.shape)} scales does not divide a weight {list(numbers.shape)}")
        codes = numbers.view(torch.uint8)
        if int((codes & _NAN).max()) == _NAN:
            raise Unencodable("a weight holds NaN")
        if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
            scales = scales.view(torch.uint8)
            largest = 2.0 ** (int(scales.max()) - 127) if scales.numel() else 0.0
        else:
            scales = scales.float()
            largest = float(scales.abs().max()) if scales.numel() else 0.0
        if not largest < _MOST_SCALE:
            raise Unencodable(f"a scale is {largest:g}; allowed: less than {_MOST_SCALE:g}")
        return {CODES: codes, SCALES: scales}

    def fits_weight(self, shape: tuple[int, ...], parts: Shapes) -> bool:
        kind, grid = parts[SCALES]
        if len(shape) != 2 or len(grid) != 2 or not all(grid) or kind not in ("float32", "uint8"):
            return False
        return parts[CODES] == ("uint8", shape) and not any(of % count for of, count in zip(shape, grid, strict=True))

    def scratch_bytes(self, shape: tuple[int, ...], piece: int) -> int:
        # At most: as many rows of factors as of values.
        rows = min(max(piece // max(shape[1], 1), 1), shape[0])
        return rows * shape[1] * (4 + 4 + 2)

    def restore(self, target: torch.Tensor, parts: Parts, scratch: torch.Tensor, piece: int) -> None:
        codes, scales = parts[CODES], parts[SCALES]
        rows, columns = target.shape
        block = rows // scales.shape[0]
        step = rows_at_once(rows, block, columns, piece)
        most, blocks = step * columns, max(step // block, 1)
        end = 4 * (most + blocks * columns)
        products, factors = scratch[:end].view(torch.float32).tensor_split([most])
        halves = scratch[end : end + 2 * most].view(torch.int16)
        pieces = zip(target.split(step), codes.view(torch.int8).view(target.shape).split(step), strict=True)
        factor = factors
        for number, (part, code) in enumerate(pieces):
            first, inside = divmod(number * step, block)
            if not inside:
                here = scales[first : first + blocks]
                factor = factors[: len(here) * columns].view(len(here), 1, columns)
                _spread(factor, here)
            half = halves[: part.numel()].view(part.shape)
            half.copy_(code).mul_(128).bitwise_and_(~_SIGN_COPY)  # sign, a zero, exponent, mantissa
            product = part if part.dtype == torch.float32 else products[: part.numel()].view(part.shape)
            product.copy_(half.view(torch.float16))
            product.view(len(factor), -1, columns).mul_(factor)
            if product is not part:
                part.copy_(product)

    def routine(self, dtype: torch.dtype = torch.bfloat16) -> Routine:
        from checkpoint.native import routines  # loads numba: not before an expert is to be restored

        def restore(target: torch.Tensor, parts: Parts, scratch: torch.Tensor) -> None:
            codes, scales = parts[CODES], parts[SCALES]
            factors, grid = first_bytes(scratch, 4 * target.shape[1]).view(torch.float32), _floats(scales)
            of_rows = codes.view(target.shape)
            routines.fp8(target.view(torch.uint16).numpy(), of_rows.numpy(), grid.numpy(), factors.numpy())

        return restore

    def restores_compiled(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2

    def check_weights(self) -> list[CheckWeight]:
        powers = torch.cat((torch.arange(-149, 119), torch.linspace(-140.0, 118.9, 244, dtype=torch.float32)))
        scales = powers.exp2().view(16, 32) * torch.tensor([1.0, -1.0]).repeat(16)
        codes = torch.arange(256, dtype=torch.uint8)
        codes = codes[codes & _NAN != _NAN].repeat(16 * 32).view(16, -1, 2, 127).transpose(1, 2)
        shape = (16 * 2, 32 * 127)
        of_e8m0 = (torch.arange(scales.numel()) % (_LARGEST_E8M0 + 1)).to(torch.uint8).view(scales.shape)
        return [(shape, {CODES: codes.reshape(shape), SCALES: grid}) for grid in (scales, of_e8m0)]


def _floats(scales: torch.Tensor) -> torch.Tensor:
    """In float32. Of E8M0, 0 is subnormal: 2^-127."""
    if scales.dtype != torch.uint8:
        return scales
    return (scales.int() << 23).clamp(min=1 << 22).view(torch.float32)


def _spread(factor: torch.Tensor, scales: torch.Tensor) -> None:
    """Each block's scale times `_HALF` at each of its columns. `factor` [blocks, 1, columns], scales [blocks, grid]."""
    of_blocks = factor.view(scales.shape[0], scales.shape[1], -1)
    of_blocks.copy_(scales.unsqueeze(-1))
    if scales.dtype == torch.uint8:
        of_blocks.sub_(127.0).exp2_()
    of_blocks.mul_(_HALF)
