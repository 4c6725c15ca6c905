"""What the experts of a model take where a store keeps them as published, from config.json alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from checkpoint.formats.settings import dtype_of, quantisation_method, quantisation_settings
from checkpoint.quantisation import Quantisation
from checkpoint.sizes.dynamic_bits import dynamic_bits
from checkpoint.sizes.integer_groups import integer_groups
from scheduler.errors import UnsupportedFormatError
from scheduler.types import ModelSize

_MX_VALUES = 32
"""In a block of MXFP4, and of MXFP8 along a row."""

_SCALE_BITS = {"mxfp4": 8, "fp8": 32, "mxfp8": 8}
_ITEM_BYTES = {"uint8": 1, "int8": 1, "int16": 2, "float16": 2, "bfloat16": 2, "float32": 4}
"""Of a store's dtypes."""
_DEFAULT_BLOCKS = {"fp8": [128, 128], "mxfp8": [1, _MX_VALUES]}
"""Of a configuration that does not name its blocks."""

_LEFT_OUT = ("modules_to_not_convert", "llm_int8_skip_modules", "ignore")
"""Where settings name modules that are not quantised."""

_PIECE = 1 << 24
"""Values that a GPU restores at a time."""

_SCRATCH_BYTES = {"mxfp4": 3 + 2 / _MX_VALUES, "fp8": 10.0, "mxfp8": 10.0}
_OTHER_SCRATCH_BYTES = 10.0
"""For each of them, of integers and codebooks in the last line."""


@dataclass(frozen=True, slots=True)
class _Experts:
    """The matrices of an expert: two of [inner, hidden], which are restored as one, and one of [hidden, inner]. Or one
    of each."""

    hidden: int
    inner: int
    up_rows: int
    """Of the largest, which has `hidden` columns."""


def with_native_experts(size: ModelSize, fields: Mapping[str, Any], native_bits: float = 0.0) -> ModelSize:
    """The size with `native_bits` and `restoring_scratch`, or as it is where sharding would dequantise experts: in
    other formats (`checkpoint/native/`), in FP4, in blocks that do not divide the matrices, and where no expert is
    quantised. Where those of some layers are, all are counted as large as the others, since the slots are.

    `fields`: config.json. `native_bits`: where they are known from the tensors. Biases, which are not encoded, are
    counted as if they were: less than a thousandth of an expert. Scratch memory is that of a GPU. Raises
    UnsupportedFormatError.
    """
    settings = quantisation_settings(fields)
    method = quantisation_method(settings) if isinstance(settings, dict) else None
    experts = _experts(size)
    if experts is None:
        return size
    bits = native_bits
    if not bits and isinstance(method, str) and isinstance(settings, dict):
        if method == "gptq":
            layers = [_expert_modules(layer) for layer in range(size.depth - size.layers, size.depth)]
            bits = dynamic_bits(
                settings, layers, lambda of: _published_bits("gptq", of, fields, experts), 8 * size.item_bytes
            )
        else:
            bits = _published_bits(method, settings, fields, experts)
        if _rounds_otherwise(method, settings, fields, size.dtype):
            bits = 0
        left_out = _layers_left_out(settings, size) if bits else 0
        if left_out:
            bits = 8 * size.item_bytes if left_out < size.layers else 0
    if not bits:
        return size
    return _restoring(size, experts, bits, _SCRATCH_BYTES.get(method or "", _OTHER_SCRATCH_BYTES))


def _restoring(size: ModelSize, experts: _Experts, bits: float, scratch: float) -> ModelSize:
    """`scratch`: bytes for each value that is restored at a time."""
    piece = min(_PIECE, experts.up_rows * experts.hidden)
    return replace(size, native_bits=bits, restoring_scratch=round(piece * scratch))


def with_quantised_experts(size: ModelSize, quantisation: Quantisation) -> ModelSize:
    """The size of a store that quantises them. As it is where an expert is none of three matrices, or of two."""
    experts = _experts(size)
    bits = quantisation.bits_of(experts.hidden, experts.inner, experts.up_rows) if experts else 0.0
    return _restoring(size, experts, bits, _OTHER_SCRATCH_BYTES) if experts and bits else size


def store_bits(manifest: Mapping[str, Any]) -> float:
    """Bits of an element of a native expert, of the layer with the largest, from a store's manifest.

    0 where its experts are not native. The file may be damaged, which whoever opens the store says."""
    try:
        full = [_sum(layer, lambda tensor: 1) for layer in manifest["full"].values()]
        held = [
            _sum(layer["tensors"], lambda tensor: _ITEM_BYTES[tensor["dtype"]]) for layer in manifest["layers"].values()
        ]
        return 8 * max(held) / max(full) if manifest["encoding"] and full else 0.0
    except (LookupError, TypeError, AttributeError, ValueError, ZeroDivisionError):
        return 0.0


def _sum(tensors: Iterable[Mapping[str, Any]], each: Callable[[Mapping[str, Any]], int]) -> int:
    return sum(math.prod(tensor["shape"]) * each(tensor) for tensor in tensors)


def _published_bits(method: str, settings: dict[str, Any], fields: Mapping[str, Any], experts: _Experts) -> float:
    """Of an element of an expert, by the settings of its format; 0 where it is stored dequantised."""
    if method in _SCALE_BITS:
        block = _block(method, settings)
        if expert_dtype(fields) not in (None, "fp8") or block is None or not _divides(block, experts):
            return 0.0
        return (4 if method == "mxfp4" else 8) + _SCALE_BITS[method] / (block[0] * block[1])
    groups = integer_groups(method, settings)
    return groups.bits_of(experts.hidden, experts.inner, experts.up_rows) if groups else 0.0


def _rounds_otherwise(method: str, settings: dict[str, Any], fields: Mapping[str, Any], dtype: str) -> bool:
    """Whether dequantised experts are rounded to another dtype before `dtype`, which no encoding of theirs does: FP8 of
    compressed-tensors in blocks, to that of its scales. These have the dtype of the checkpoint."""
    groups = integer_groups(method, settings) if method == "compressed-tensors" else None
    return groups is not None and groups.rows > 1 and dtype != (dtype_of(fields) or "bfloat16")


def _experts(size: ModelSize) -> _Experts | None:
    """From the number of an expert's elements, with biases or without."""
    for up in (2, 1):
        for biases in (1, 0):  # those of gpt-oss have as many elements as one without biases and a row more
            inner, rest = divmod(size.expert - biases * size.hidden, (up + 1) * size.hidden + biases * up)
            if inner > 0 and not rest:
                return _Experts(size.hidden, inner, up * inner)
    return None


def expert_dtype(fields: Mapping[str, Any]) -> Any:
    """As DeepSeek-V4 names it, in either place."""
    settings, text = quantisation_settings(fields), fields.get("text_config")
    inner = text.get("expert_dtype") if isinstance(text, dict) else None
    settings = settings if isinstance(settings, dict) else {}
    return settings.get("expert_dtype") or fields.get("expert_dtype") or inner


def _block(method: str, settings: dict[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of the values that have a scale together. None where it is none of a fixed size."""
    if method == "mxfp4":
        return 1, _MX_VALUES
    found = settings.get("weight_block_size", _DEFAULT_BLOCKS[method])
    if not isinstance(found, list) or len(found) != 2 or not all(type(n) is int and n > 0 for n in found):
        return None
    return found[0], found[1]


def _divides(block: tuple[int, int], experts: _Experts) -> bool:
    rows, columns = block
    sizes = (experts.hidden, experts.inner)
    return all(size % rows == 0 and size % columns == 0 for size in sizes)


def _layers_left_out(settings: dict[str, Any], size: ModelSize) -> int:
    """How many layers' experts the settings leave out, by the rules of Transformers' `should_convert_module`.

    The layers without experts are taken to be the first. Raises UnsupportedFormatError for names that are no list."""
    key = next((key for key in _LEFT_OUT if settings.get(key)), "ignore")
    named = settings.get(key) or []
    if not isinstance(named, list):
        raise UnsupportedFormatError(
            f"{key} in the quantization_config of config.json is {named!r}; it must be a list of names"
        )
    patterns = [one for one in named if isinstance(one, str)]
    return sum(
        any(_matches(pattern, name) for name in _expert_modules(layer) for pattern in patterns)
        for layer in range(size.depth - size.layers, size.depth)
    )


def _expert_modules(layer: int) -> Iterator[str]:
    """Names that the experts' module of a layer has in published models."""
    for model in ("model", "model.language_model", "language_model.model"):
        for block in ("mlp", "block_sparse_moe", "feed_forward"):
            yield f"{model}.layers.{layer}.{block}.experts"


def _matches(pattern: str, name: str) -> bool:
    """By Transformers' rule, or that of compressed-tensors, which marks regular expressions."""
    pattern = pattern.removeprefix("re:")
    try:
        return name.endswith(pattern) or re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", name) is not None
    except re.error:
        return False
