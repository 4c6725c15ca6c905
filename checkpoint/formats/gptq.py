"""GPTQ with weights of 2, 4 or 8 bits, in the layouts of AutoGPTQ (`gptq`) and GPTQModel (`gptq_v2`).

Their packages are not needed.
Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022;
AutoGPTQ/AutoGPTQ, its module `auto_gptq.nn_modules.qlinear.qlinear_cuda_old`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from checkpoint.formats.packed import PackedFormat
from checkpoint.native.encoding import CODES, SCALES, Parts
from checkpoint.native.encodings import INTEGERS
from checkpoint.native.integers import ORDER, ZEROS, packed_rows
from scheduler.errors import UnsupportedFormatError

if TYPE_CHECKING:
    from checkpoint.place import Place

_BITS = (2, 4, 8)
_LAYOUTS = {"gptq": 1, "gptq_v2": 0}
"""What is added to a stored zero point."""


class Gptq(PackedFormat):
    """`X.qweight` (int32 [in * bits / 32, out]), `X.qzeros` (int32 [groups, out * bits / 32]), `X.scales` ([groups,
    out]) and `X.g_idx` (int32 [in], the group of each input)."""

    words = needed = ("qweight", "qzeros", "scales", "g_idx")
    encodings = (INTEGERS,)

    def check_settings(self) -> None:
        bits = self.setting("bits", 4)
        layout = "marlin" if self.settings.get("is_marlin_format") else self.setting("checkpoint_format", "gptq")
        if bits not in _BITS or layout not in _LAYOUTS:
            raise UnsupportedFormatError(
                f"{self.path} is quantised by GPTQ with {bits} bits in the layout {layout!r}, which cannot be read; "
                f"give a checkpoint with {', '.join(map(str, _BITS))} bits in the layout {' or '.join(_LAYOUTS)}, or "
                "one in bfloat16"
            )

    def check_shapes(self, names: dict[str, str], places: dict[str, Place]) -> None:
        rows, columns = places["qweight"].shape
        (inputs,) = places["g_idx"].shape
        groups = places["scales"].shape[0]
        bits = 32 * rows // inputs
        self.expect(names["qweight"], places["qweight"], "I32", (inputs * bits // 32, places["scales"].shape[1]))
        self.expect(names["qzeros"], places["qzeros"], "I32", (groups, columns * bits // 32))

    def shape(self, parts: dict[str, Place]) -> tuple[int, ...]:
        return parts["qweight"].shape[1], parts["g_idx"].shape[0]

    def restore(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        return restored(**parts, added=self._added)

    @property
    def _added(self) -> int:
        return _LAYOUTS[self.setting("checkpoint_format", "gptq")]

    def published(self, quantizer: Any, parts: dict[str, torch.Tensor], target: str) -> Parts:
        order = _groups(parts["g_idx"], len(parts["scales"]))
        numbers, zeros, bits = _numbers(parts["qweight"], parts["qzeros"], len(order), self._added)
        found = {CODES: packed_rows(numbers.to(torch.uint8), bits), SCALES: parts["scales"].T}
        found[ZEROS] = zeros.T.to(torch.uint8)
        size, rest = divmod(len(order), len(parts["scales"]))
        if self.setting("desc_act", False) or rest or not torch.equal(order, torch.arange(len(order)) // size):
            found[ORDER] = order.unsqueeze(0)
        return found


def restored(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, g_idx: torch.Tensor, added: int
) -> torch.Tensor:
    """A weight [out, in] in the dtype of its scales: (value - zero point) * scale, each input in its group.

    `added` to a stored zero point, which stays in its bits: AutoGPTQ stores one less. Raises ValueError for a group
    that does not exist.
    """
    numbers, zeros, _ = _numbers(qweight, qzeros, len(g_idx), added)
    values = numbers.T  # [in, out]
    group = _groups(g_idx, len(scales))
    return ((values - zeros[group]) * scales[group]).T.contiguous()


def _groups(g_idx: torch.Tensor, count: int) -> torch.Tensor:
    """The group of each input, int64 [in]. Raises ValueError for a group that does not exist."""
    group = g_idx.long()
    if not 0 <= int(group.min()) <= int(group.max()) < count:
        raise ValueError(f"g_idx holds groups {int(group.min())} to {int(group.max())}, there are {count}")
    return group


def _numbers(
    qweight: torch.Tensor, qzeros: torch.Tensor, inputs: int, added: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Numbers [out, in], zero points [groups, out], and their bits."""
    bits = 32 * len(qweight) // inputs
    zeros = (unpacked(qzeros, bits) + added) & (2**bits - 1)
    return unpacked(qweight.T.contiguous(), bits), zeros, bits


def unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [n, m] -> int16 [n, m * 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((packed.unsqueeze(-1) >> shifts) & (2**bits - 1)).to(torch.int16).flatten(1)
