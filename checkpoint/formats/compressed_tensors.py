"""compressed-tensors, as Kimi-K2 and llm-compressor publish: packed integers of 1 to 8 bits, FP8, NVFP4, MXFP4, mixed.

Its own package restores each weight; it is imported when such a checkpoint is opened.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from checkpoint.formats.base import PublishedFormat, by_suffix
from checkpoint.native.codebook import FACTORS, TABLE, named_scales
from checkpoint.native.encoding import CODES, SCALES, Parts, Unencodable
from checkpoint.native.encodings import CODEBOOK, FP8, INTEGERS
from checkpoint.native.integers import ZEROS, packed_rows
from scheduler.errors import CorruptCheckpointError, UnsupportedFormatError

if TYPE_CHECKING:
    from checkpoint.place import Place

_READ = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision"),
)


class CompressedTensors(PublishedFormat):
    """`X.weight_packed` or `X.weight`, and `X.weight_scale`, `_zero_point`, `_global_scale`, `_shape` where needed."""

    encodings = (INTEGERS, FP8, CODEBOOK)

    def make_quantizer(self, config: Any) -> Any:
        groups = self._groups()
        named = {str(one["format"]) for one in (self.settings, *groups) if one.get("format")}
        if self.settings.get("sparsity_config") or not named <= set(_READ) or not groups:
            raise UnsupportedFormatError(
                f"{self.path} is stored by compressed-tensors as {', '.join(sorted(named)) or 'unknown'}"
                f"{', sparse' if self.settings.get('sparsity_config') else ''}; these can be read: {', '.join(_READ)}. "
                "Give one of those, or a checkpoint in bfloat16"
            )
        from checkpoint.formats.compressed_tensors_quantizer import PackedConfig, PackedQuantizer

        return PackedQuantizer(PackedConfig.from_dict(self.loading_settings()), pre_quantized=True)

    def _groups(self) -> list[dict[str, Any]]:
        found = self.settings.get("config_groups")
        return [group for group in found.values() if isinstance(group, dict)] if isinstance(found, dict) else []

    def loading_settings(self) -> dict[str, Any]:
        from checkpoint.formats.compressed_tensors_quantizer import METHOD

        return super().loading_settings() | {"quant_method": METHOD}

    def grouped(self, places: dict[str, Place]) -> dict[str, dict[str, str]]:
        order = next((name for name in places if name.endswith(".weight_g_idx")), None)
        if order is not None:
            raise UnsupportedFormatError(
                f"{places[order].file}: {order} reorders the columns of a compressed-tensors weight, which cannot be "
                "read; give a checkpoint that was quantised without actorder=group, or one in bfloat16"
            )
        found = by_suffix(places, self.quantizer(None).serialized_names)
        return {plain: names for plain, names in found.items() if names.keys() != {"weight"}}

    def check_parts(self, plain: str, names: dict[str, str], parts: dict[str, Place]) -> None:
        data = next((word for word in ("weight_packed", "weight") if word in parts), "weight_packed")
        for word in (data, "weight_scale"):
            if word not in parts:
                raise self.lost(plain.removesuffix("weight") + word, names, parts)
        scale, weight = parts["weight_scale"], parts[data]
        blocks = any((group.get("weights") or {}).get("strategy") == "block" for group in self._groups())
        if scale.shape and scale.shape[0] not in (1, weight.shape[0]) and not blocks:
            raise CorruptCheckpointError(
                f"{scale.file}: {names['weight_scale']} is {list(scale.shape)}, its weight has {weight.shape[0]} rows; "
                "fetch it again, if it was downloaded"
            )

    def shape(self, parts: dict[str, Place]) -> tuple[int, ...]:
        if "weight_shape" in parts:
            return _values(parts["weight_shape"])
        if "weight" in parts:
            return parts["weight"].shape
        rows, columns = parts["weight_packed"].shape  # two values of 4 bits a byte
        return rows, 2 * columns

    def check(self, word: str, name: str, tensor: torch.Tensor) -> None:
        if word.endswith("scale"):
            self.check_finite(name, tensor)

    def encoding(self, quantizer: Any) -> str:
        weights = quantizer.experts_scheme().weights
        if weights.type == "int":
            return INTEGERS
        return {8: FP8, 4: CODEBOOK}.get(weights.num_bits, "")

    def published(self, quantizer: Any, parts: dict[str, torch.Tensor], target: str) -> Parts:
        weights, scale = quantizer.scheme(target).weights, parts["weight_scale"]
        if self.encoding(quantizer) == CODEBOOK:
            return _published_fp4(parts)
        if self.encoding(quantizer) == FP8:
            return {CODES: parts["weight"].view(torch.uint8), SCALES: scale.float().view(-1, scale.shape[-1])}
        numbers, zeros = quantizer.integers(parts, target)
        scale = scale.view(-1, scale.shape[-1] if scale.dim() > 1 else 1).expand(len(numbers), -1)
        found = {CODES: packed_rows(_unsigned(numbers, weights.num_bits), weights.num_bits), SCALES: scale}
        if zeros is not None:
            found[ZEROS] = _unsigned(zeros.view(-1, scale.shape[1]).expand(len(numbers), -1), weights.num_bits)
        return found


def _published_fp4(parts: dict[str, torch.Tensor]) -> Parts:
    """Of NVFP4, whose scales in E4M3 are divided by one of the weight, and of MXFP4, whose scales are powers of two."""
    from compressed_tensors.compressors.mx_utils import decompress_mx_scale
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    scale, bytes_ = parts["weight_scale"], torch.arange(256, dtype=torch.uint8)
    if scale.dtype == torch.uint8:
        values = decompress_mx_scale(bytes_).to(torch.bfloat16)
    else:
        values = bytes_.view(scale.dtype).to(torch.bfloat16)
    if "weight_global_scale" in parts:
        values = values / parts["weight_global_scale"].view(1)
    packed = parts["weight_packed"]
    numbers = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    table = unpack_fp4_from_uint8(torch.arange(16, dtype=torch.uint8).view(16, 1), 16, 2)[:, :1]
    return {
        CODES: packed_rows(numbers, 4),
        TABLE: table.float().view(1, -1),
        FACTORS: torch.ones((1, 1), dtype=table.dtype),
        **named_scales(scale.view(torch.uint8), values.float()),
    }


def _unsigned(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Of signed integers, whose least is 0 then. Raises Unencodable."""
    found = numbers.short() + (1 << bits - 1)
    if int(found.min()) < 0 or int(found.max()) >> bits:
        raise Unencodable(f"integers from {int(numbers.min())} to {int(numbers.max())} have more than {bits} bits")
    return found.to(torch.uint8)


def _values(place: Place) -> tuple[int, ...]:
    """The integers that a small tensor holds."""
    with place.file.open("rb") as stream:
        data = os.pread(stream.fileno(), place.nbytes, place.start)
    kind = torch.int32 if place.dtype == "I32" else torch.int64
    return tuple(torch.frombuffer(bytearray(data), dtype=kind).tolist())
