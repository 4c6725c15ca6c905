"""Blocks of a GGUF tensor as integers with group scales (`checkpoint/native/integers.py`) or codes of a table
(`checkpoint/native/codebook.py`), without dequantising them.

Source: `ggml-quants.c` of ggml, and the package gguf, which dequantises the same blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy
import torch

from checkpoint.formats.gguf_file import GgufFile, GgufTensor
from checkpoint.native.codebook import SCALE_TABLE, TABLE
from checkpoint.native.encoding import CODES, SCALES, Parts, Unencodable
from checkpoint.native.encodings import GGML_CODEBOOK, GGML_INTEGERS
from checkpoint.native.integers import MINIMUM_UNITS, MINIMUMS, SCALE_UNITS, packed_rows

Blocks = torch.Tensor
"""uint8 [..., bytes of a block]."""


class _Kind(NamedTuple):
    """A type of ggml: a number's bits, and what a block holds, each [..., numbers or groups]."""

    bits: int
    read: Callable[[Blocks], dict[str, torch.Tensor]]
    tables: Callable[[], dict[str, torch.Tensor]] = dict
    """What the blocks of all tensors have in common: parts, each a row of values."""


def quantised_kind(kind: int) -> str:
    """The name of a type of ggml that has blocks; empty for floats."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    found = GGMLQuantizationType(kind)
    return found.name if GGML_QUANT_SIZES[found][0] > 1 else ""


def published_blocks(kind: int, rows: torch.Tensor) -> Parts:
    """The parts of n weights, each [n, rows, ...], of uint8 [n, rows, bytes] of a type of ggml.

    Raises Unencodable for a type that these are not.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name = GGMLQuantizationType(kind).name
    if name not in _KINDS:
        raise Unencodable(f"its experts are in {name}; these are kept: {', '.join(_KINDS)}")
    known = _KINDS[name]
    found = known.read(rows.unflatten(-1, (-1, GGML_QUANT_SIZES[GGMLQuantizationType[name]][1])))
    parts = {part: value.flatten(2).contiguous() for part, value in found.items()}
    parts |= {part: value.expand(len(rows), 1, -1) for part, value in known.tables().items()}
    return parts | {CODES: packed_rows(parts[CODES], known.bits)}


def encoding_of(kinds: Iterable[str]) -> str:
    """The encoding that keeps experts in these types, by their names."""
    return GGML_CODEBOOK if any(name in _KINDS and _KINDS[name].tables is not dict for name in kinds) else GGML_INTEGERS


def has_encoding(file: GgufFile) -> bool:
    """Whether a store can keep the experts of some layer as published."""
    return any(kept_bits(tensor.kind) for layer in _experts(file) for tensor in layer.values())


def expert_bits(file: GgufFile) -> float:
    """Bits that a store keeps for each value of an expert as published, of the layer with the most; 0 where it
    dequantises them."""
    found = [_layer_bits(tensors) for tensors in _experts(file)]
    return max(found) if has_encoding(file) and all(found) else 0.0


def _experts(file: GgufFile) -> list[dict[str, GgufTensor]]:
    """The tensors of each layer's: `gate`, `up`, `down`, or `gate_up`."""
    layers: dict[str, dict[str, GgufTensor]] = {}
    for name, tensor in file.tensors.items():
        if name.endswith("_exps.weight"):
            layer, _, which = name.removesuffix("_exps.weight").partition(".ffn_")
            layers.setdefault(layer, {})[which] = tensor
    return list(layers.values())


def _layer_bits(tensors: dict[str, GgufTensor]) -> float:
    """Gate and up-projection are one parameter, whose blocks must be of one type. Floats stay as they are."""
    halves = {tensors[which].kind for which in ("gate", "up") if which in tensors}
    if len(halves) > 1 and any(map(quantised_kind, halves)):
        return 0.0
    values = [math.prod(tensor.shape) for tensor in tensors.values()]
    bits = [kept_bits(tensor.kind) or _float_bits(tensor.kind) for tensor in tensors.values()]
    if not all(bits):
        return 0.0
    return sum(count * each for count, each in zip(values, bits, strict=True)) / sum(values)


def _float_bits(kind: int) -> float:
    """Bits of a value of a type without blocks; 0 for one with blocks."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    return 0.0 if quantised_kind(kind) else 8.0 * GGML_QUANT_SIZES[GGMLQuantizationType(kind)][1]


def kept_bits(kind: int) -> float:
    """Bits that a store keeps for a value of this type of ggml; 0 for one that it dequantises."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    values, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if GGMLQuantizationType(kind).name not in _KINDS:
        return 0.0
    parts = published_blocks(kind, torch.zeros((1, 1, size), dtype=torch.uint8))
    return 8 * sum(part.nbytes for name, part in parts.items() if name not in (TABLE, SCALE_TABLE)) / values


def _half(block: Blocks, at: int) -> torch.Tensor:
    """A float16 of each block: [..., 1]."""
    return block[..., at : at + 2].contiguous().view(torch.float16)


def _runs(packed: torch.Tensor, width: int) -> torch.Tensor:
    """uint8 [..., m], whose bytes hold several numbers: [..., 8 / width * m], the lowest bits of all bytes first."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8).unsqueeze(-1)
    return (packed.unsqueeze(-2) >> shifts & (1 << width) - 1).flatten(-2)


def _chunks(packed: torch.Tensor, width: int, each: int) -> torch.Tensor:
    """The same for each `each` bytes."""
    return _runs(packed.unflatten(-1, (-1, each)), width).flatten(-2)


def _q4_0(block: Blocks) -> dict[str, torch.Tensor]:
    return {CODES: _runs(block[..., 2:], 4), SCALES: _half(block, 0)}


def _q4_1(block: Blocks) -> dict[str, torch.Tensor]:
    return {CODES: _runs(block[..., 4:], 4), SCALES: _half(block, 0), MINIMUMS: _half(block, 2)}


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Of 32 numbers, the first in the lowest bit: uint8 [..., 4] -> [..., 32], 0 or 16."""
    return (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2) << 4


def _q5_0(block: Blocks) -> dict[str, torch.Tensor]:
    return {CODES: _runs(block[..., 6:], 4) | _fifth_bits(block[..., 2:6]), SCALES: _half(block, 0)}


def _q5_1(block: Blocks) -> dict[str, torch.Tensor]:
    numbers = _runs(block[..., 8:], 4) | _fifth_bits(block[..., 4:8])
    return {CODES: numbers, SCALES: _half(block, 0), MINIMUMS: _half(block, 2)}


def _q8_0(block: Blocks) -> dict[str, torch.Tensor]:
    return {CODES: block[..., 2:] ^ 128, SCALES: _half(block, 0)}


def _q2_k(block: Blocks) -> dict[str, torch.Tensor]:
    """A scale and a minimum of 4 bits in each byte."""
    units = {SCALE_UNITS: _half(block, 80), MINIMUM_UNITS: _half(block, 82)}
    return {CODES: _chunks(block[..., 16:80], 2, 32), SCALES: block[..., :16]} | units


def _q3_k(block: Blocks) -> dict[str, torch.Tensor]:
    high, low, packed = block[..., :32], block[..., 32:96], block[..., 96:108]
    steps = _runs(packed[..., :8], 4) | _runs(packed[..., 8:], 2) << 4
    numbers = _chunks(low, 2, 32) | _runs(high, 1) << 2
    return {CODES: numbers, SCALES: (steps.to(torch.int8) - 32), SCALE_UNITS: _half(block, 108)}


def _steps(packed: torch.Tensor) -> dict[str, torch.Tensor]:
    """Scales and minimums of 6 bits each, 8 of both in 12 bytes."""
    scale, least, rest = packed.split(4, dim=-1)
    return {
        SCALES: torch.cat((scale & 63, rest & 15 | scale >> 2 & 48), dim=-1),
        MINIMUMS: torch.cat((least & 63, rest >> 4 | least >> 2 & 48), dim=-1),
    }


def _q4_k(block: Blocks) -> dict[str, torch.Tensor]:
    units = {SCALE_UNITS: _half(block, 0), MINIMUM_UNITS: _half(block, 2)}
    return {CODES: _chunks(block[..., 16:], 4, 32)} | _steps(block[..., 4:16]) | units


def _q5_k(block: Blocks) -> dict[str, torch.Tensor]:
    numbers = _chunks(block[..., 48:], 4, 32) | _runs(block[..., 16:48], 1) << 4
    units = {SCALE_UNITS: _half(block, 0), MINIMUM_UNITS: _half(block, 2)}
    return {CODES: numbers} | _steps(block[..., 4:16]) | units


def _q6_k(block: Blocks) -> dict[str, torch.Tensor]:
    numbers = _chunks(block[..., :128], 4, 64) | _chunks(block[..., 128:192], 2, 32) << 4
    return {CODES: numbers, SCALES: block[..., 192:208].view(torch.int8), SCALE_UNITS: _half(block, 208)}


def _iq4_nl(block: Blocks) -> dict[str, torch.Tensor]:
    return {CODES: _runs(block[..., 2:], 4), SCALES: _half(block, 0)}


def _iq4_xs(block: Blocks) -> dict[str, torch.Tensor]:
    high = block[..., 2:4].unsqueeze(-1) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3
    low = block[..., 4:8].unsqueeze(-1) >> torch.tensor([0, 4], dtype=torch.uint8) & 15
    steps = (low.flatten(-2) | high.flatten(-2) << 4).to(torch.int8) - 32
    return {CODES: _chunks(block[..., 8:], 4, 16), SCALES: steps, SCALE_UNITS: _half(block, 0)}


def _mxfp4(block: Blocks) -> dict[str, torch.Tensor]:
    return {CODES: _runs(block[..., 1:], 4), SCALES: block[..., :1]}


def _values_of_q2() -> dict[str, torch.Tensor]:
    return {TABLE: torch.arange(4.0)}


def _values_of_iq4() -> dict[str, torch.Tensor]:
    from gguf.quants import IQ4_NL

    return {TABLE: torch.tensor(IQ4_NL.kvalues, dtype=torch.float32)}


def _values_of_mxfp4() -> dict[str, torch.Tensor]:
    """The numbers twice, and half of the powers of two."""
    from gguf.quants import MXFP4

    scales = torch.from_numpy(MXFP4.e8m0_to_fp32_half(numpy.arange(256, dtype=numpy.uint8)))
    return {TABLE: torch.tensor(MXFP4.kvalues, dtype=torch.float32), SCALE_TABLE: scales}


_KINDS = {
    "Q4_0": _Kind(4, _q4_0),
    "Q4_1": _Kind(4, _q4_1),
    "Q5_0": _Kind(5, _q5_0),
    "Q5_1": _Kind(5, _q5_1),
    "Q8_0": _Kind(8, _q8_0),
    "Q2_K": _Kind(2, _q2_k, _values_of_q2),
    "Q3_K": _Kind(3, _q3_k),
    "Q4_K": _Kind(4, _q4_k),
    "Q5_K": _Kind(5, _q5_k),
    "Q6_K": _Kind(6, _q6_k),
    "IQ4_NL": _Kind(4, _iq4_nl, _values_of_iq4),
    "IQ4_XS": _Kind(4, _iq4_xs, _values_of_iq4),
    "MXFP4": _Kind(4, _mxfp4, _values_of_mxfp4),
}
