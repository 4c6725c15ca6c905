"""Transformers' quantiser of compressed-tensors, also for experts with zero points and for several groups of layers."""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.utils.match import match_name
from transformers.integrations.compressed_tensors import get_dense_scheme, get_experts_scheme
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer, _is_fp8_scheme
from transformers.utils.quantization_config import CompressedTensorsConfig

from checkpoint.formats.unpack import Unpack

METHOD = "odmoe_compressed_tensors"
"""The `quant_method` under which Transformers finds this quantiser."""


@register_quantization_config(METHOD)
class PackedConfig(CompressedTensorsConfig):  # type: ignore[misc]
    """As the base class, under a name of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.quant_method = METHOD
        self.dequantize = True


@register_quantizer(METHOD)
class PackedQuantizer(CompressedTensorsHfQuantizer):  # type: ignore[misc]
    """Transformers' own drops the zero points of experts, and takes one group for all dense layers."""

    use_fp8_kernel = False

    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": Unpack}

    def unpack(self, parts: dict[str, torch.Tensor], target: str) -> torch.Tensor:
        if parts.keys() == {"weight"}:
            return parts["weight"]
        settings = self.compressor.quantization_config
        scheme = self.scheme(target)
        if _of_experts(target) and _is_fp8_scheme(scheme) and scheme.weights.strategy != "block":
            # As Transformers' own operation, to the last bit.
            return parts["weight"].float() * parts["weight_scale"].float()
        compressor = BaseCompressor.get_value_from_registry(scheme.format or settings.format)
        found: torch.Tensor = compressor.decompress(parts, scheme)["weight"]
        return found

    def integers(self, parts: dict[str, torch.Tensor], target: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The signed numbers of a weight [out, in], and its zero points [out, groups], if it has any."""
        args, zeros = self.scheme(target).weights, parts.get("weight_zero_point")
        if "weight_packed" not in parts:
            return parts["weight"], zeros
        shape = parts["weight_shape"].tolist()
        if zeros is not None and not args.symmetric:
            groups = (shape[0], parts["weight_scale"].shape[-1])
            zeros = unpack_from_int32(zeros, args.num_bits, groups, packed_dim=0)
        return unpack_from_int32(parts["weight_packed"], args.num_bits, shape), zeros

    def experts_scheme(self) -> Any:
        """The settings of the group that experts are in."""
        return get_experts_scheme(self.compressor.quantization_config)

    def scheme(self, target: str) -> Any:
        """The settings of the group that a layer is in, by the names and classes that the groups list."""
        settings = self.compressor.quantization_config
        if _of_experts(target):
            return self.experts_scheme()
        groups = list(settings.config_groups.values())
        for group in groups:
            if any(match_name(target.rpartition(".")[0], name) for name in group.targets):
                return group
        return next((group for group in groups if "Linear" in group.targets), None) or get_dense_scheme(settings)


def _of_experts(target: str) -> bool:
    return ".experts." in target
