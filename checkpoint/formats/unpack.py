"""The operation that restores packed weights while Transformers converts a checkpoint: for formats whose weights are
several tensors each, with no rows in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from checkpoint.formats.unreadable import DAMAGED, unreadable

Restore = Callable[[dict[str, torch.Tensor]], torch.Tensor]
METHOD = "odmoe_packed"
"""The `quant_method` under which Transformers finds this quantiser."""


_DAMAGED = (*DAMAGED, RuntimeError, AssertionError, MemoryError)
"""What the formats' own functions raise for parts that do not belong together."""


class Unpack(ConversionOps):  # type: ignore[misc]
    """Calls `unpack` of the quantiser for each weight, of dense layers and of experts.

    Keys are the words of a weight's parts (`qweight`, `scales`) for a dense layer, and patterns that end in them
    (`experts.*.up_proj.qweight`) with a list of tensors, one an expert, for experts.
    """

    casts = True
    """Tensors of another dtype than the model's are cast to it, quantised or not."""

    def __init__(self, hf_quantizer: Any) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(
        self, input_dict: dict[str, Any], *, full_layer_name: str, model: Any, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        dtype = model.get_parameter_or_buffer(full_layer_name).dtype
        words = sorted(self.hf_quantizer.serialized_names["weight"], key=len, reverse=True)
        weights: dict[str, dict[str, list[torch.Tensor]]] = {}
        for key, value in input_dict.items():
            word = next(word for word in words if key == word or key.endswith(f".{word}"))
            listed = value if isinstance(value, list) else [value]
            weights.setdefault(key.removesuffix(word), {})[word] = listed
        found = {}
        for stem, parts in weights.items():
            try:
                restored = [
                    self.hf_quantizer.unpack(dict(zip(parts, one, strict=True)), full_layer_name).to(dtype)
                    for one in zip(*parts.values(), strict=True)
                ]
            except _DAMAGED as error:
                what = f"the parts of {full_layer_name} ({', '.join(parts)}) do not make a weight"
                raise unreadable(what, error) from error
            found[f"{stem}weight" if stem else full_layer_name] = torch.stack(restored) if stem else restored[0]
        return found

    @property
    def reverse_op(self) -> Any:
        raise NotImplementedError("a restored weight is not quantised again")


@register_quantization_config(METHOD)
class UnpackingConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """`words`: those that a weight's parts may have. `restore`: makes a weight [out, in] of its parts, by word."""

    def __init__(self, words: Sequence[str], restore: Restore, **kwargs: Any) -> None:
        super().__init__(quant_method=METHOD)
        self.words = words
        self.restore = restore
        self.dequantize = True


@register_quantizer(METHOD)
class UnpackingQuantizer(HfQuantizer):  # type: ignore[misc]
    """A quantiser of our own: Transformers has none that dequantises this format, or only with a large package."""

    requires_calibration = True

    def __init__(self, quantization_config: UnpackingConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        words = quantization_config.words
        self.serialized_names = {"weight": ["weight", *(word for word in words if word != "weight")]}

    def unpack(self, parts: dict[str, torch.Tensor], target: str) -> torch.Tensor:
        """A weight [out, in] of its parts, by word. It is the model's parameter `target`, or a part of that."""
        plain = parts.get("weight")
        if plain is not None and plain.is_floating_point():
            return plain
        found: torch.Tensor = self.quantization_config.restore(parts)
        return found

    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": Unpack}

    @property
    def is_trainable(self) -> bool:
        return False

    def is_serializable(self, *args: Any) -> bool:
        return False
