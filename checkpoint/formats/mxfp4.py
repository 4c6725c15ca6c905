"""MXFP4, as gpt-oss publishes its experts: blocks of 32 values of 4 bits (E2M1) and one power of two (E8M0).

Source: OCP Microscaling Formats (MX) Specification 1.0, section 5.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from checkpoint.formats.base import PublishedFormat, by_suffix
from checkpoint.native.encodings import MXFP4
from scheduler.errors import CorruptCheckpointError

if TYPE_CHECKING:
    import torch

    from checkpoint.place import Place

_BYTES = 16
_NAN = 255
"""The E8M0 scale that stands for NaN."""


class Mxfp4(PublishedFormat):
    """`X_blocks` (uint8 [E, rows, blocks, 16], two values a byte) and `X_scales` (uint8 [E, rows, blocks])."""

    operations = frozenset({"Mxfp4Dequantize"})
    encodings = (MXFP4,)

    def make_quantizer(self, config: Any) -> Any:
        from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
        from transformers.utils.quantization_config import Mxfp4Config

        skipped = self.settings.get("modules_to_not_convert")
        return Mxfp4HfQuantizer(Mxfp4Config(modules_to_not_convert=skipped, dequantize=True), pre_quantized=True)

    def grouped(self, places: dict[str, Place]) -> dict[str, dict[str, str]]:
        return by_suffix(places, self.quantizer(None).serialized_names)

    def check_parts(self, plain: str, names: dict[str, str], parts: dict[str, Place]) -> None:
        stem = plain.rpartition(".")[2]
        words = (f"{stem}_blocks", f"{stem}_scales")
        for word in words:
            if word not in parts:
                raise self.lost(plain.rpartition(".")[0] + f".{word}", names, parts)
        blocks, scales = (parts[word] for word in words)
        if blocks.shape[-1:] != (_BYTES,) or blocks.dtype != "U8":
            raise CorruptCheckpointError(
                f"{blocks.file}: {names[words[0]]} is {blocks.dtype} {list(blocks.shape)}; MXFP4 has U8 [..., {_BYTES}]"
            )
        if scales.shape != blocks.shape[:-1] or scales.dtype != "U8":
            raise CorruptCheckpointError(
                f"{scales.file}: {names[words[1]]} is {scales.dtype} {list(scales.shape)}, which does not belong to "
                f"{names[words[0]]}, {list(blocks.shape)}: MXFP4 has a U8 for each block; fetch it again"
            )

    def shape(self, parts: dict[str, Place]) -> tuple[int, ...]:
        (blocks,) = (place for word, place in parts.items() if word.endswith("_blocks"))
        *lead, rows, count, _ = blocks.shape
        return (*lead, count * 2 * _BYTES, rows)  # transposed, as gpt-oss multiplies

    def check(self, word: str, name: str, tensor: torch.Tensor) -> None:
        if word.endswith("_scales") and bool((tensor == _NAN).any()):
            raise CorruptCheckpointError(
                f"{self.path}: {name} holds a scale of NaN; fetch it again, if it was downloaded"
            )
