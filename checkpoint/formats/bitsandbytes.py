"""bitsandbytes' checkpoints of 4 bits (NF4 and FP4, also with nested scales) and of 8 bits (LLM.int8()).

Source: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023, and "LLM.int8()", 2022.
"""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

import torch

from checkpoint.formats.packed import PackedFormat

if TYPE_CHECKING:
    from checkpoint.place import Place

_STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_WORDS = (
    *("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
    *_STATES,
    *("SCB", "weight_format"),
)


class BitsAndBytes(PackedFormat):
    """4 bits: `X.weight` (uint8 [n, 1]) and `X.weight.absmax`, `.quant_map`, `.quant_state.bitsandbytes__nf4`.
    8 bits: `X.weight` (int8 [out, in]) and `X.SCB` (float32 [out])."""

    words = _WORDS
    needed = ("weight",)
    scales = ("weight.absmax", "weight.nested_absmax", "SCB")

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
        held = {name: value.clone() for name, value in parts.items() if name != "weight"}
        state = functional.QuantState.from_dict(held, device=torch.device("cpu"))
        _check_lengths(weight, state)
        found = functional.dequantize_4bit(weight, state)
        return found


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
