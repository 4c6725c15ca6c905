"""A GGUF file: its tensors, and what Transformers makes of its settings.

Source: the GGUF specification of ggml. Transformers converts configuration and tokenizer.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from checkpoint.formats.unreadable import DAMAGED, REMEDY, first_line, is_out_of_memory
from scheduler.errors import CheckpointError, CorruptCheckpointError, NoTokenizerError, UnsupportedFormatError

SUFFIX = ".gguf"
ARCHITECTURES = ("qwen2moe", "qwen3moe", "qwen35moe", "minimax-m2")
"""The MoE architectures that Transformers 5.23 reads with their experts. Of others it leaves the experts random."""
_WIDTHS = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Settings that Transformers leaves at the default of the family, which is one model's."""
_DAMAGED = (*DAMAGED, struct.error, MemoryError)
"""What Transformers and the package gguf raise for a header that is cut or damaged: MemoryError for a length in it."""
_ALIGNMENT = 32
"""Of the tensors, where the file names none."""
_ORIGIN = "give the checkpoint that it was made from (a directory with config.json and safetensors)"

T = TypeVar("T")


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor is: `nbytes` from `start` of the file."""

    kind: int
    """ggml's number of its type."""
    shape: tuple[int, ...]
    """Of its values, as in torch."""
    start: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """A file whose header has been checked."""

    path: Path
    architecture: str
    tensors: dict[str, GgufTensor] = field(repr=False)
    config: dict[str, Any] = field(repr=False)
    """As config.json would have it."""
    dtype: str
    """In which Transformers loads it where none is given."""
    data_start: int
    """Where the header ends and the tensors begin."""


def is_gguf(path: Path) -> bool:
    """Whether a path is, by its name, a GGUF file, which may not exist."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def read_gguf(path: Path) -> GgufFile:
    """Check a file and read its header. Raises CheckpointError, UnsupportedFormatError, CorruptCheckpointError."""
    if not path.exists():
        raise CheckpointError(f"model {str(path)!r} is a GGUF file that does not exist; check the name")
    metadata, tensors, data_start = _whole(path, lambda: _header(path))
    architecture = metadata["general.architecture"]
    parts = metadata.get("split.count", 1)
    if not isinstance(parts, int) or parts < 0:
        raise CorruptCheckpointError(
            f"{path} is damaged: its split.count is {parts!r}; fetch it again, if it was downloaded"
        )
    if parts > 1:
        raise UnsupportedFormatError(
            f"{path} is one of {parts} parts of a GGUF file; join them with: llama-gguf-split --merge FIRST NEW, and "
            "give NEW"
        )
    if architecture not in ARCHITECTURES:
        raise UnsupportedFormatError(
            f"{path} is a GGUF file of the architecture {architecture!r}, which Transformers does not read with its "
            f"experts; these can be read: {', '.join(ARCHITECTURES)}. For another, {_ORIGIN}"
        )
    for kind in {one.kind for one in tensors.values()}:
        _check_kind(path, kind)
    config = _whole(path, lambda: _config(path, metadata))
    return GgufFile(path, architecture, tensors, config, _dtype(path, architecture), data_start)


def write_settings(file: GgufFile, folder: Path) -> None:
    """Write config.json and the tokenizer's files, as Transformers makes them of this file."""
    (folder / "config.json").write_text(json.dumps(file.config, indent=1))
    if has_tokenizer(file.path):
        gguf_tokenizer(file.path).save_pretrained(folder)


def has_tokenizer(path: Path) -> bool:
    """Whether the file holds a vocabulary. Raises CorruptCheckpointError."""
    return _has_tokenizer(path, _stamp(path))


def gguf_tokenizer(path: Path) -> Any:
    """The tokenizer as Transformers makes it of the file. Of one file it is made once, since that takes seconds.

    Raises NoTokenizerError, CorruptCheckpointError.
    """
    return _tokenizer(path, _stamp(path))


def _stamp(path: Path) -> tuple[int, int]:
    """Other where the file has been replaced."""
    status = _whole(path, path.stat)
    return status.st_size, status.st_mtime_ns


@lru_cache(maxsize=1)
def _has_tokenizer(path: Path, stamp: tuple[int, int]) -> bool:
    from transformers.integrations.gguf import read_gguf_metadata

    metadata, _ = _whole(path, lambda: read_gguf_metadata(str(path)))
    return bool(metadata.get("tokenizer.ggml.tokens"))


@lru_cache(maxsize=1)
def _tokenizer(path: Path, stamp: tuple[int, int]) -> Any:
    from transformers import AutoTokenizer

    if not has_tokenizer(path):
        raise NoTokenizerError(f"{path} has no tokenizer, which a prompt of text needs; {_ORIGIN}")
    try:
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except Exception as error:  # the tokenizers library raises Exception itself
        raise CorruptCheckpointError(
            f"no tokenizer can be read from {path}: {error}; fetch it again, if it was downloaded"
        ) from error


def _whole(path: Path, read: Callable[[], T]) -> T:
    """What `read` reads of the file. Raises CorruptCheckpointError."""
    try:
        return read()
    except _DAMAGED as error:
        small = ", or there is too little memory for its header" * is_out_of_memory(error)
        raise CorruptCheckpointError(
            f"{path} is damaged, or not a whole GGUF file{small} ({first_line(error)}); {REMEDY}"
        ) from error
    except OSError as error:
        raise CorruptCheckpointError(
            f"{path} cannot be read ({error.strerror or error}); fetch it again, if it was downloaded"
        ) from error


def _header(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor], int]:
    """Metadata, tensors, and where their bytes begin. The vocabulary is not read: it takes the package gguf seconds.

    Raises ValueError and others of `_DAMAGED`.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from transformers.integrations.gguf import reader

    data = reader._mapped(str(path))
    metadata, count, end = reader._read_metadata(data, str(path))
    entries, end = reader._read_tensor_table(data, count, end)
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    data_start = -(-end // alignment) * alignment
    found: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in entries:
        values, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if not shape or min(shape) < 1 or shape[-1] % values or name in found:
            raise ValueError(f"{name} has the shape {list(shape)}, or is there twice")
        found[name] = GgufTensor(kind, shape, data_start + offset, math.prod(shape) // values * nbytes)
        if found[name].start + found[name].nbytes > len(data):
            raise ValueError(f"it ends before {name} does")
    return metadata, found, data_start


def _check_kind(path: Path, kind: int) -> None:
    """Raises UnsupportedFormatError for a type that the package gguf cannot dequantise."""
    import numpy
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    known = GGMLQuantizationType(kind)
    try:
        dequantize(numpy.zeros((1, GGML_QUANT_SIZES[known][1]), numpy.uint8), known)
    except NotImplementedError as error:
        raise UnsupportedFormatError(
            f"{path} has tensors of the type {known.name}, which cannot be dequantised; {_ORIGIN}"
        ) from error


def _config(path: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    for ours, theirs in _WIDTHS.items():
        width = metadata.get(f"{metadata['general.architecture']}.{ours}")
        if width is not None and hasattr(config, theirs):
            setattr(config, theirs, int(width))
    end = metadata.get("tokenizer.ggml.eos_token_id")
    if end is not None:  # Transformers takes it into the tokenizer alone, and an answer would not end
        config.eos_token_id = int(end)
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return found


def _dtype(path: Path, architecture: str) -> str:
    from transformers.integrations.gguf import GgufHeader, is_gguf_arch_supported

    if not is_gguf_arch_supported(architecture):
        return "float32"
    try:
        return str(GgufHeader.from_file(str(path)).dtype or "float32").removeprefix("torch.")
    except ValueError as error:
        raise CheckpointError(f"Transformers cannot read {path}: {error}") from error
