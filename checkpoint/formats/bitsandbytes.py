"""bitsandbytes' checkpoints of 4 bits (NF4 and FP4, also with nested scales) and of 8 bits (LLM.int8()).

Source: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023, and "LLM.int8()", 2022.
"""

from __future__ import annotations

import json
import math
import os
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from checkpoint.formats.packed import PackedFormat
from checkpoint.native.codebook import FACTORS, SCALE_OFFSETS, TABLE, UNIT_GROUPS, named_scales, scale_units_of
from checkpoint.native.encoding import CODES, SCALES, Parts, Unencodable
from checkpoint.native.encodings import CODEBOOK
from checkpoint.native.integers import packed_rows

if TYPE_CHECKING:
    from checkpoint.place import Place

_STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_WORDS = (
    *("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
    *_STATES,
    *("SCB", "weight_format"),
)
_PER_STEP = 7.874015718698502e-3
"""1 / 127 as LLM.int8() has it: a row's largest number stands for its scale."""


class BitsAndBytes(PackedFormat):
    """4 bits: `X.weight` (uint8 [n, 1]) and `X.weight.absmax`, `.quant_map`, `.quant_state.bitsandbytes__nf4`.
    8 bits: `X.weight` (int8 [out, in]) and `X.SCB` (float32 [out])."""

    words = _WORDS
    needed = ("weight",)
    scales = ("weight.absmax", "weight.nested_absmax", "SCB")
    encodings = (CODEBOOK,)

    def is_plain(self, weight: Place) -> bool:
        return weight.dtype not in ("U8", "I8")

    def check_shapes(self, names: dict[str, str], places: dict[str, Place]) -> None:
        eight_bits = places["weight"].dtype == "I8"
        wanted = ["SCB"] if eight_bits else ["weight.absmax", "weight.quant_map"]
        if not eight_bits and not any(word in places for word in _STATES):
            wanted.append(_STATES[0])
        if "weight.absmax" in places and places["weight.absmax"].dtype == "U8":  # the scales are quantised, too
            wanted += ["weight.nested_absmax", "weight.nested_quant_map"]
        missing = next((word for word in wanted if word not in places), None)
        if missing is not None:
            raise self.lost(names["weight"].removesuffix("weight") + missing, names, places)
        if "SCB" in places:
            self.expect(names["SCB"], places["SCB"], "F32", places["weight"].shape[:1])

    def shape(self, parts: dict[str, Place]) -> tuple[int, ...]:
        state = next((parts[word] for word in _STATES if word in parts), None)
        if state is None:
            return parts["weight"].shape
        with state.file.open("rb") as stream:
            found = json.loads(os.pread(stream.fileno(), state.nbytes, state.start))
        return tuple(found["shape"])

    def restore(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """By bitsandbytes' own functions."""
        from bitsandbytes import functional

        weight = parts["weight"]
        if "SCB" in parts:
            found: torch.Tensor = functional.int8_vectorwise_dequant(weight, parts["SCB"])
            return found
        found = functional.dequantize_4bit(weight, _state(parts))
        return found

    def published(self, quantizer: Any, parts: dict[str, torch.Tensor], target: str) -> Parts:
        if "SCB" in parts:
            numbers = parts["weight"].view(torch.uint8) ^ 128  # the least is 0
            table, factor = torch.arange(-128.0, 128.0), torch.full((1, 1), _PER_STEP)
            return {CODES: numbers, SCALES: parts["SCB"].unsqueeze(1), TABLE: table.unsqueeze(0), FACTORS: factor}
        if parts["weight"].is_floating_point():
            raise Unencodable(f"{target} is not quantised")
        return _published_codes(parts)


def _published_codes(parts: dict[str, torch.Tensor]) -> Parts:
    """Of a weight of 4 bits, whose blocks are those of the flattened weight."""
    state = _state(parts)
    rows, columns = state.shape
    if columns % state.blocksize:
        raise Unencodable(f"its rows have {columns} values, which blocks of {state.blocksize} do not divide")
    packed = parts["weight"].view(-1)
    numbers = torch.stack((packed >> 4, packed & 15), dim=1).view(rows, columns)
    found = {
        CODES: packed_rows(numbers, 4),
        SCALES: state.absmax.view(rows, -1),
        TABLE: _values(state.quant_type).unsqueeze(0),
        FACTORS: torch.ones((1, 1), dtype=state.dtype),
    }
    if state.nested:
        if state.state2.blocksize != UNIT_GROUPS:
            raise Unencodable(f"{state.state2.blocksize} of its scales have a scale together, not {UNIT_GROUPS}")
        found |= named_scales(found[SCALES], state.state2.code)
        found |= scale_units_of(state.state2.absmax, *found[SCALES].shape)
        found[SCALE_OFFSETS] = state.offset.view(1, 1)
    return found


@cache
def _values(kind: str) -> torch.Tensor:
    """The values of the codes, float32 [16], as the kernel has them: it has a zero with a minus in FP4."""
    from bitsandbytes import functional

    packed = torch.arange(0, 256, 34, dtype=torch.uint8) + 1  # 0x01, 0x23 to 0xef
    table = functional.get_4bit_type(kind, device="cpu")
    state = functional.QuantState(torch.ones(1), torch.Size((1, 16)), table, 64, kind, torch.float32)
    found: torch.Tensor = functional.dequantize_4bit(packed.unsqueeze(1), state)
    return found.view(-1)


def _state(parts: dict[str, torch.Tensor]) -> Any:
    """bitsandbytes' description of a weight of 4 bits. Raises ValueError."""
    from bitsandbytes import functional

    held = {name: value.clone() for name, value in parts.items() if name != "weight"}
    state = functional.QuantState.from_dict(held, device=torch.device("cpu"))
    _check_lengths(parts["weight"], state)
    return state


def _check_lengths(weight: torch.Tensor, state: Any) -> None:
    """The kernel reads as many scales as there are blocks, whether they are there or not. Raises ValueError."""
    count = math.prod(state.shape)
    blocks = -(-count // state.blocksize)
    wanted = {"weight": (weight, -(-count // 2)), "absmax": (state.absmax, blocks), "quant_map": (state.code, 16)}
    if state.nested:
        nested = state.state2
        wanted["nested_absmax"] = nested.absmax, -(-blocks // nested.blocksize)
        wanted["nested_quant_map"] = nested.code, 256
    for name, (tensor, length) in wanted.items():
        if tensor.numel() != length:
            raise ValueError(f"{name} has {tensor.numel()} values, a weight of {list(state.shape)} has {length}")
