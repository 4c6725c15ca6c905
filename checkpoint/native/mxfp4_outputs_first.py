"""MXFP4 of weights [out, in], whose codes and scales lie as those of their transpose.

So the products that read encoded bytes (`checkpoint/native/row_products.py`) are those of MXFP4, in every family.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from checkpoint.native.encoding import CODES, SCALES, CheckWeight, Parts, Shapes, first_bytes
from checkpoint.native.mxfp4 import BLOCK, Mxfp4, bits_of_values
from checkpoint.native.product_scratch import TURNED
from checkpoint.native.routine_check import Routine
from checkpoint.tensors import round_up


class Mxfp4OutputsFirst(Mxfp4):
    """As `Mxfp4`, but the restored weight is [out, in]."""

    name = "mxfp4 outputs first"
    inputs_first = False

    def stored_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        return shape[1], shape[0]

    def fits_weight(self, shape: tuple[int, ...], parts: Shapes) -> bool:
        return super().fits_weight(shape[::-1], parts)

    def scratch_bytes(self, shape: tuple[int, ...], piece: int) -> int:
        return max(super().scratch_bytes(shape[::-1], piece), sum(_scratch_bytes(shape[0])))

    def shares(self, target: torch.Tensor, parts: Parts, threads: int) -> Iterator[list[tuple[torch.Tensor, Parts]]]:
        """A share of the inputs for each thread."""
        for shares in super().shares(target.t(), parts, threads):
            yield [(share.t(), theirs) for share, theirs in shares]

    def restore(self, target: torch.Tensor, parts: Parts, scratch: torch.Tensor, piece: int) -> None:
        super().restore(target.t(), parts, scratch, piece)

    def routine(self, dtype: torch.dtype = torch.bfloat16) -> Routine:
        from checkpoint.native import mxfp4_turning as routines  # loads numba: not before an expert is to be restored

        table = bits_of_values().numpy()

        def restore(target: torch.Tensor, parts: Parts, scratch: torch.Tensor) -> None:
            (outputs, inputs), stride = target.shape, target.stride(0)
            flat = target.as_strided(((outputs - 1) * stride + inputs,), (1,)).view(torch.uint64).numpy()
            values, factors, turned = _scratch_bytes(outputs)
            own = first_bytes(scratch, values + factors + turned).split([values, factors, turned])
            rows = [part.view(torch.uint32).numpy() for part in own[:2]]
            codes = parts[CODES].view(inputs, outputs // 2).numpy()
            words = own[2].view(torch.uint64).numpy()
            routines.restore_turned(flat, stride // 4, codes, parts[SCALES].numpy(), *rows, words, table)

        return restore

    def restores_compiled(self, shape: tuple[int, ...]) -> bool:
        return super().restores_compiled(shape[::-1])

    def check_weights(self) -> list[CheckWeight]:
        return [((columns, rows), parts) for (rows, columns), parts in super().check_weights()]


def _scratch_bytes(outputs: int) -> tuple[int, int, int]:
    """Of the compiled routine: a block's values, a factor for each output, and a tile of values turned."""
    return 2 * BLOCK * outputs, round_up(2 * outputs, 8), 2 * BLOCK * TURNED
