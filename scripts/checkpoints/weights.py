"""Random weights in the forms in which checkpoints are published."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BF16, FP8, MXFP4, ONES, ZEROS = "bf16", "fp8", "mxfp4", "ones", "zeros"
SIDE = 128
"""Of a block of FP8 that shares a scale."""
BLOCK = 32
"""Values of MXFP4 that share a scale."""
FP8_MOST = 448.0
"""The largest finite value of E4M3."""
CODE_STD = 2.926
"""Standard deviation of the sixteen values of E2M1, each as likely as the others."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight, which is one or two tensors of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    """[out, in]; MXFP4: [E, out, in], quantised along the last dimension."""
    encoding: str
    """`BF16`, `FP8`, `MXFP4`; `ONES` and `ZEROS` are not random."""
    std: float = 0.0
    wide: bool = False
    """Float32 rather than bfloat16."""

    @property
    def nbytes(self) -> int:
        """In the checkpoint."""
        count = math.prod(self.shape)
        if self.encoding == MXFP4:
            return count // 2 + count // BLOCK
        if self.encoding == FP8:
            return count + 4 * math.ceil(self.shape[0] / SIDE) * math.ceil(self.shape[1] / SIDE)
        return count * (4 if self.wide else 2)

    def draw(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """The tensors by their names in the checkpoint."""
        import torch

        if self.encoding == MXFP4:
            blocks, scales = _mxfp4(self.shape, self.std, generator)
            return {f"{self.name}_blocks": blocks, f"{self.name}_scales": scales}
        if self.encoding == FP8:
            values = torch.randn(self.shape, generator=generator).mul_(self.std)
            quantised, scale = fp8(values)
            return {self.name: quantised, f"{self.name}_scale_inv": scale}
        values = torch.empty(self.shape, dtype=torch.float32 if self.wide else torch.bfloat16)
        if self.encoding == BF16:
            return {self.name: values.normal_(0, self.std, generator=generator)}
        return {self.name: values.fill_(1 if self.encoding == ONES else 0)}


def fp8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] of float32 as E4M3, and the factor of each block of 128 x 128, which restores it, as DeepSeek-V3 has
    it (section 3.3.2 of its report). Blocks at the edges are smaller."""
    import torch

    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, -columns % SIDE, 0, -rows % SIDE))
    blocks = padded.view(padded.shape[0] // SIDE, SIDE, padded.shape[1] // SIDE, SIDE)
    scale = blocks.abs().amax((1, 3)).clamp_(min=1e-12).div_(FP8_MOST)
    quantised = (blocks / scale[:, None, :, None]).view(padded.shape)[:rows, :columns]
    return quantised.to(torch.float8_e4m3fn).contiguous(), scale


def _mxfp4(shape: tuple[int, ...], std: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks, [E, out, in / 32, 16] with two values of E2M1 a byte, and the exponents of their scales, biased by 127
    (OCP Microscaling Formats 1.0, sections 5.3 and 5.4). Every code is as likely, and each scale one of two."""
    import torch

    *rows, columns = shape
    blocks = torch.randint(0, 256, (*rows, columns // BLOCK, BLOCK // 2), dtype=torch.uint8, generator=generator)
    middle = 127 + round(math.log2(std / CODE_STD))
    scales = torch.randint(middle - 1, middle + 1, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
    return blocks, scales
