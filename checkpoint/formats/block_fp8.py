"""Weights of 8 bits (E4M3) with a scale for each block, as DeepSeek-V3 published them: blocks of 128 x 128 and float32.

The same for MXFP8 (blocks of 1 x 32, a power of two each) and for experts of 4 bits (E2M1, two a byte) as in
DeepSeek-V4. Source: DeepSeek-V3 Technical Report, section 3.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from checkpoint.formats.base import PublishedFormat, by_suffix
from checkpoint.native.encodings import FP8
from scheduler.errors import CorruptCheckpointError, UnsupportedFormatError

if TYPE_CHECKING:
    from checkpoint.place import Place

_WEIGHT, _SCALE = "weight", "weight_scale_inv"
_STATIC = "weight_scale"
"""The scale of a whole matrix in checkpoints of AutoFP8 and of early vLLM. Transformers does not read it."""
_WORDS = {_WEIGHT: [_WEIGHT, _SCALE, "activation_scale", _STATIC]}
_OTHER_NAMES = {".scale": _SCALE, ".qscale_weight": _SCALE}
"""How some publishers name the scales; Transformers' quantiser renames them."""
_EIGHT_BITS, _FOUR_BITS = ("F8_E4M3", "F8_E5M2"), "I8"
_POWERS = ("F8_E8M0", "U8")
_SCALES = ("F32", "BF16", "F16", *_POWERS)
_MX_BLOCK = (1, 32)


class BlockFp8(PublishedFormat):
    """`X.weight` (F8_E4M3 [rows, columns]) and `X.weight_scale_inv` (a scale for each block)."""

    operations = frozenset({"BlockDequantize"})
    encodings = (FP8,)

    def __init__(self, name: str, settings: dict[str, Any], path: Any) -> None:
        super().__init__(name, settings, path)
        block = settings.get("weight_block_size", (128, 128))
        if block is not None and not _is_block(block):
            raise UnsupportedFormatError(
                f"{path}: weight_block_size {block!r} in the quantization_config of config.json is no pair of positive "
                "numbers; fetch it again, if it was downloaded"
            )
        self._block: tuple[int, int] | None = None if block is None else (block[0], block[1])

    def make_quantizer(self, config: Any) -> Any:
        from checkpoint.formats.fp8_quantizer import BlockConfig, BlockQuantizer

        return BlockQuantizer(BlockConfig.from_dict(self.loading_settings()), pre_quantized=True)

    def loading_settings(self) -> dict[str, Any]:
        from checkpoint.formats.fp8_quantizer import METHOD

        return super().loading_settings() | {"quant_method": METHOD}

    def grouped(self, places: dict[str, Place]) -> dict[str, dict[str, str]]:
        found = by_suffix(places, _WORDS)
        for name in places:
            for end, word in _OTHER_NAMES.items():
                plain = name.removesuffix(end) + f".{_WEIGHT}"
                if name.endswith(end) and plain in found:
                    found[plain].setdefault(word, name)
        kinds = (*_EIGHT_BITS, _FOUR_BITS)
        return {
            plain: names
            for plain, names in found.items()
            if names.keys() != {_WEIGHT} or places[names[_WEIGHT]].dtype in kinds
        }

    def check_parts(self, plain: str, names: dict[str, str], parts: dict[str, Place]) -> None:
        if _STATIC in parts and _SCALE not in parts:
            raise UnsupportedFormatError(
                f"{self.path} holds {names[_STATIC]}: FP8 with one static scale a matrix, as AutoFP8 writes it, cannot "
                "be read; give a checkpoint with weight_scale_inv, one in compressed-tensors, or one in bfloat16"
            )
        for word, part in ((_WEIGHT, plain), (_SCALE, f"{plain}_scale_inv")):
            if word not in parts:
                raise self.lost(part, names, parts)
        weight, scale = parts[_WEIGHT], parts[_SCALE]
        if weight.dtype not in (*_EIGHT_BITS, _FOUR_BITS) or len(weight.shape) < 2:
            raise CorruptCheckpointError(
                f"{weight.file}: {names[_WEIGHT]} is {weight.dtype} {list(weight.shape)} and has scales; a matrix of "
                f"{', '.join(_EIGHT_BITS)} or {_FOUR_BITS} was expected; fetch it again, if it was downloaded"
            )
        grids = self._grids(weight, scale)
        if scale.dtype not in _SCALES or _grid(scale.shape) not in grids:
            wanted = " or ".join(str(list(grid)) for grid in grids)
            raise CorruptCheckpointError(
                f"{scale.file}: {names[_SCALE]} is {scale.dtype} {list(scale.shape)}, its weight "
                f"{list(weight.shape)} wants {wanted}; fetch it again, if it was downloaded"
            )

    def _grids(self, weight: Place, scale: Place) -> list[tuple[int, ...]]:
        """The shapes that a weight's scales may have."""
        *lead, rows, columns = self.shape({_WEIGHT: weight})
        blocks = [self._block] if self._block else []
        if scale.dtype in _POWERS or weight.dtype == _FOUR_BITS:
            blocks.append(_MX_BLOCK)
        grids: list[tuple[int, ...]] = [(*lead, -(-rows // high), -(-columns // wide)) for high, wide in blocks]
        return grids if self._block else [*grids, (*lead, 1, 1)]

    def shape(self, parts: dict[str, Place]) -> tuple[int, ...]:
        weight = parts[_WEIGHT]
        *lead, columns = weight.shape
        return (*lead, columns * 2 if weight.dtype == _FOUR_BITS else columns)

    def check(self, word: str, name: str, tensor: torch.Tensor) -> None:
        if word != _SCALE:
            return
        self.check_finite(name, tensor.view(torch.float8_e8m0fnu) if tensor.dtype == torch.uint8 else tensor)

    def rows(self, parts: dict[str, Place]) -> int | None:
        grid = _grid(parts[_SCALE].shape)
        weight = parts[_WEIGHT].shape
        if len(weight) != 2 or grid == (1, 1):
            return None
        high = self._block[0] if self._block and grid[0] == -(-weight[0] // self._block[0]) else 1
        return high if grid[0] == -(-weight[0] // high) else None

    def row_parts(self, parts: dict[str, Place], first: int, last: int) -> dict[str, Place]:
        high = self.rows(parts) or 1
        weight, scale = parts[_WEIGHT], parts[_SCALE]
        return {_WEIGHT: weight.rows(first, last), _SCALE: scale.rows(first // high, -(-last // high))}


def _is_block(block: Any) -> bool:
    pair = isinstance(block, (list, tuple)) and len(block) == 2
    return pair and all(type(size) is int and size > 0 for size in block)


def _grid(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of scales with the two dimensions of a matrix: a single scale may have fewer."""
    return (*(1 for _ in range(2 - len(shape))), *shape)
