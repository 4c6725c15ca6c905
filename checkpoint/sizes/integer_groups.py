"""How the numbers of AWQ, GPTQ, compressed-tensors and bitsandbytes are grouped, from config.json alone.

Without torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

_SCALE_BITS = 16
"""Of a scale: published ones are float16 or bfloat16."""
_ZERO_BITS = 8
_ORDER_BITS = 16
_TABLE_BYTES = 4 * 16 + 2
"""Of a matrix whose codes name values of a table (`checkpoint/native/codebook.py`), with a factor."""
_BYTE_TABLE = 4 * 256
_BLOCK = 64
"""Of bitsandbytes."""
_BLOCKS = 256
"""Whose scales have a scale together there."""


class IntegerGroups(NamedTuple):
    """How a store keeps the matrices of an expert: as integers, as codes of a table, or in FP8 with a scale for a row
    (`checkpoint/native/`)."""

    bits: int
    side_bits: float
    """Of a group's scale and zero point."""
    size: int
    """Values in a group; 0 for a row."""
    has_order: bool = False
    rows: int = 1
    """That share their scales."""
    may_be_uneven: bool = False
    """A last group may be smaller than the others: its inputs then have an order."""
    together: int = 0
    """Groups whose scales have a float32 together, counted over a matrix; 0 for none."""
    table_bytes: int = 0
    """Of a matrix's tables."""

    def bits_of(self, hidden: int, inner: int, up_rows: int) -> float:
        """Of an element of an expert: a matrix [up_rows, hidden] and one [hidden, inner]. 0 where groups do not divide
        the rows, or rows the matrices, which are then stored dequantised."""
        values = side = 0.0
        for rows, columns, orders in ((up_rows, hidden, up_rows // inner), (hidden, inner, 1)):
            groups, rest = divmod(columns, self.size or columns)
            if rows % self.rows or (rest and not self.may_be_uneven):
                return 0.0
            values += rows * columns
            side += rows * ((groups + bool(rest)) * self.side_bits + self._unit_bits(groups))
            side += orders * columns * _ORDER_BITS * (self.has_order or bool(rest)) + orders * 8 * self.table_bytes
        return self.bits + side / values

    def _unit_bits(self, groups: int) -> int:
        """Of a row, see `scale_units_of` of `checkpoint/native/codebook.py`."""
        if not self.together or self.together % groups == 0:
            return 32 * bool(self.together)
        return 32 * ((groups + self.together - 2) // self.together + 1) + 8


def integer_groups(method: str, settings: dict[str, Any]) -> IntegerGroups | None:
    """By `quant_method` and `quantization_config`. None for what is not kept as published, or cannot be read."""
    match method:
        case "awq":
            return _of(4, settings.get("group_size", 128), zeros=True)
        case "gptq":
            order = settings.get("desc_act") is True
            found = _of(settings.get("bits", 4), settings.get("group_size", 128), zeros=True, order=order)
            return found and found._replace(may_be_uneven=True)
        case "compressed-tensors":
            return _compressed(settings)
        case "bitsandbytes":
            return _bitsandbytes(settings)
    return None


def _bitsandbytes(settings: dict[str, Any]) -> IntegerGroups:
    if settings.get("load_in_8bit"):
        return IntegerGroups(8, 32, 0, table_bytes=_BYTE_TABLE + 4)
    if settings.get("bnb_4bit_use_double_quant"):
        return IntegerGroups(4, 8, _BLOCK, together=_BLOCKS, table_bytes=_TABLE_BYTES + _BYTE_TABLE + 4)
    return IntegerGroups(4, 32, _BLOCK, table_bytes=_TABLE_BYTES)


def _of(bits: Any, size: Any, zeros: bool, order: bool = False) -> IntegerGroups | None:
    if type(bits) is not int or bits not in range(1, 9) or type(size) is not int or size < -1 or size == 0:
        return None
    return IntegerGroups(bits, _SCALE_BITS + _ZERO_BITS * zeros, max(size, 0), order)


def _compressed(settings: dict[str, Any]) -> IntegerGroups | None:
    weights = _experts_weights(settings.get("config_groups"))
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    if weights.get("type") == "float":
        return _fp8(weights) if bits == 8 else _fp4(weights) if bits == 4 else None
    if weights.get("type", "int") != "int" or strategy not in ("group", "channel", "tensor"):
        return None
    return _of(bits, weights.get("group_size") if strategy == "group" else -1, zeros=weights.get("symmetric") is False)


def _fp8(weights: dict[str, Any]) -> IntegerGroups | None:
    """Scales are float32 in a store. Of a block, its columns are a group, whose rows share a scale."""
    match weights.get("strategy"), weights.get("block_structure"):
        case "channel" | "tensor", _:
            return IntegerGroups(8, 2 * _SCALE_BITS, 0)
        case "block", [int(high), int(wide)] if high > 0 and wide > 0:
            return IntegerGroups(8, 2 * _SCALE_BITS / high, wide, rows=high)
    return None


def _fp4(weights: dict[str, Any]) -> IntegerGroups | None:
    """NVFP4 and MXFP4, with scales of a byte."""
    size = weights.get("group_size")
    if weights.get("strategy") not in ("tensor_group", "group") or type(size) is not int or size < 1:
        return None
    return IntegerGroups(4, 8, size, table_bytes=_TABLE_BYTES + _BYTE_TABLE)


def _experts_weights(groups: Any) -> dict[str, Any]:
    """The settings of the experts' weights: of the group that names experts, or the first that names classes."""
    found = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    targets = [[str(one) for one in group.get("targets") or ()] for group in found]
    named = (group for group, some in zip(found, targets, strict=True) if any(map(_names_experts, some)))
    classes = (group for group, some in zip(found, targets, strict=True) if not all(map(_is_pattern, some)))
    weights = next(named, next(classes, found[0] if found else {})).get("weights")
    return weights if isinstance(weights, dict) else {}


def _is_pattern(target: str) -> bool:
    return target.startswith("re:")


def _names_experts(target: str) -> bool:
    return _is_pattern(target) and "experts" in target
