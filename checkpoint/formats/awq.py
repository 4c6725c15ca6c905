"""AWQ with weights of 4 bits, in the layout of AutoAWQ's `WQLinear_GEMM`. Its package is not needed.

Source: Lin et al., "AWQ: Activation-aware Weight Quantization", 2023; casper-hansen/AutoAWQ, its module
`awq.utils.packing_utils`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from checkpoint.formats.packed import PackedFormat
from checkpoint.native.encoding import CODES, SCALES, Parts
from checkpoint.native.encodings import INTEGERS
from checkpoint.native.integers import ZEROS, packed_rows
from scheduler.errors import UnsupportedFormatError

if TYPE_CHECKING:
    from checkpoint.place import Place

_BITS = 4
_VALUES = 32 // _BITS
"""Values an int32."""
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of each of eight neighbouring columns in an int32."""


class Awq(PackedFormat):
    """`X.qweight` (int32 [in, out / 8]), `X.qzeros` (int32 [groups, out / 8]) and `X.scales` ([groups, out])."""

    words = needed = ("qweight", "qzeros", "scales")
    encodings = (INTEGERS,)

    def check_settings(self) -> None:
        bits = self.setting("bits", self.setting("w_bit", _BITS))
        layout = str(self.setting("version", "gemm")).lower()
        if bits != _BITS or layout != "gemm":
            raise UnsupportedFormatError(
                f"{self.path} is quantised by AWQ with {bits} bits in the layout {layout!r}, which cannot be read; "
                f"give a checkpoint with {_BITS} bits in the layout 'gemm', or one in bfloat16"
            )

    def check_shapes(self, names: dict[str, str], places: dict[str, Place]) -> None:
        rows, packed = places["qweight"].shape
        groups, columns = places["scales"].shape
        self.expect(names["qweight"], places["qweight"], "I32", (rows, columns // _VALUES))
        self.expect(names["qzeros"], places["qzeros"], "I32", (groups, packed))

    def shape(self, parts: dict[str, Place]) -> tuple[int, ...]:
        return parts["scales"].shape[1], parts["qweight"].shape[0]

    def restore(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        return restored(**parts)

    def published(self, quantizer: Any, parts: dict[str, torch.Tensor], target: str) -> Parts:
        numbers, zeros = (_columns(parts[word]).T.contiguous().view(torch.uint8) for word in ("qweight", "qzeros"))
        return {CODES: packed_rows(numbers, _BITS), SCALES: parts["scales"].T, ZEROS: zeros}


def restored(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """A weight [out, in] in the dtype of its scales: (value - zero point) * scale, a group of inputs at a time."""
    values, zeros = _columns(qweight), _columns(qzeros)
    size = len(values) // len(scales)
    grouped = values.unflatten(0, (len(scales), size))
    return ((grouped - zeros.unsqueeze(1)) * scales.unsqueeze(1)).flatten(0, 1).T.contiguous()


def _columns(packed: torch.Tensor) -> torch.Tensor:
    """int32 [n, out / 8] -> int8 [n, out]."""
    shifts = torch.tensor(_ORDER, dtype=torch.int32) * _BITS
    return ((packed.unsqueeze(-1) >> shifts) & (2**_BITS - 1)).to(torch.int8).flatten(1)
