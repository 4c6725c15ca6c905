"""Transformers' FP8 quantiser, also for matrices whose last blocks are cut."""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils.quantization_config import FineGrainedFP8Config

METHOD = "odmoe_fp8"
"""The `quant_method` under which Transformers finds this quantiser."""


class BlockDequantize(Fp8Dequantize):  # type: ignore[misc]
    """As the base class, which takes a block's size from the number of scales: 576 rows with 5 scales, as DeepSeek-V3
    has them, it refuses, and to 192 rows with 2 scales it gives blocks of 96 rows where they have 128 and 64."""

    def _dequantize_one(
        self, quantized: torch.Tensor, scales: torch.Tensor, output_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        rows, columns = quantized.shape[-2:]
        below, right = self._missing(quantized, scales)
        if below == right == 0:
            return super()._dequantize_one(quantized, scales, output_dtype)
        whole = torch.nn.functional.pad(quantized, (0, right, 0, below))
        return super()._dequantize_one(whole, scales, output_dtype)[..., :rows, :columns].contiguous()

    def _missing(self, quantized: torch.Tensor, scales: torch.Tensor) -> tuple[int, int]:
        """Rows and columns that the last blocks lack."""
        block = self.hf_quantizer.quantization_config.weight_block_size
        if block is None or quantized.dtype == torch.int8 or scales.dim() < 2:
            return 0, 0
        missing = [
            count * size - have
            for count, size, have in zip(scales.shape[-2:], block, quantized.shape[-2:], strict=True)
        ]
        fits = all(0 <= lack < size for lack, size in zip(missing, block, strict=True))
        return (missing[0], missing[1]) if fits else (0, 0)


@register_quantization_config(METHOD)
class BlockConfig(FineGrainedFP8Config):  # type: ignore[misc]
    """As the base class, under a name of its own."""


@register_quantizer(METHOD)
class BlockQuantizer(FineGrainedFP8HfQuantizer):  # type: ignore[misc]
    """As the base class, with that operation. It only dequantises, for which it needs no other package."""

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        pass

    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": BlockDequantize}
