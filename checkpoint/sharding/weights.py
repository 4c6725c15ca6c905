"""Finds each tensor of a checkpoint in its files and reads it into memory that is reused."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import safetensors
import torch

from checkpoint.direct_io import PIECE_BYTES, open_direct, read_at, room_for
from checkpoint.place import Place
from checkpoint.sharding.model_directory import cure
from checkpoint.sharding.source import Source, read_header
from checkpoint.tensors import PAGE, aligned_buffer
from scheduler.errors import CheckpointError, CorruptCheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""Torch's dtype for each of safetensors' that a checkpoint's weights can have."""


class DequantisedWeight(Protocol):
    """A dense weight of the model that is dequantised when it is written, with the properties of a `Place`."""

    @property
    def file(self) -> Path: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...

    def pieces(self) -> Iterator[torch.Tensor]:
        """The bytes of the weight as uint8, some rows at a time. Raises CheckpointError, CorruptCheckpointError."""
        ...


Dense = Place | DequantisedWeight


def places(source: Source) -> dict[str, Place]:
    """Every tensor of a checkpoint, in the order of `source.files`. Raises CorruptCheckpointError.

    The safetensors library has checked each header for lengths, order and gaps. Tensors of a GGUF file are bytes (U8),
    in rows as long as a row of the tensor.
    """
    if source.gguf is not None:
        return {
            name: Place(
                source.path, "U8", (*one.shape[:-1], one.nbytes // math.prod(one.shape[:-1])), one.start, one.nbytes
            )
            for name, one in source.gguf.tensors.items()
        }
    found: dict[str, Place] = {}
    for file in source.weight_files():
        try:
            with safetensors.safe_open(file, framework="pt"):
                header, raw = read_header(file)
        except safetensors.SafetensorError as error:
            raise CorruptCheckpointError(f"{file} is damaged ({error}); {cure(file)}") from error
        for key, entry in header.items():
            if key != "__metadata__":
                first, end = entry["data_offsets"]
                found[key] = Place(file, entry["dtype"], tuple(entry["shape"]), 8 + len(raw) + first, end - first)
    return {key: found[key] for key in source.files}


def read(places: dict[str, Place], buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors as views of `buffer` (uint8, page-aligned, at least `buffer_bytes(wanted)` long).

    Raises CheckpointError, CorruptCheckpointError.
    """
    found, at = {}, 0
    with contextlib.ExitStack() as stack:
        files: dict[Path, int] = {}
        for key, place in places.items():
            if place.dtype not in DTYPES:
                raise CheckpointError(f"{place.file}: {key} has dtype {place.dtype}, which experts cannot have")
            if place.file not in files:
                files[place.file] = _open(place.file, stack)
            data = _bytes(files[place.file], place, buffer[at:])
            at += room_for(place.start, place.nbytes)
            dtype = DTYPES[place.dtype]
            aligned = data if data.storage_offset() % dtype.itemsize == 0 else data.clone()
            found[key] = aligned.view(dtype).view(place.shape)
    return found


def buffer_bytes(places: dict[str, Place]) -> int:
    """How long a buffer `read` needs."""
    return sum(room_for(place.start, place.nbytes) for place in places.values())


class Pieces:
    """Reads tensors of any length through one small buffer."""

    def __init__(self) -> None:
        self._buffer = aligned_buffer(PIECE_BYTES + PAGE)

    def of(self, place: Place) -> Iterator[torch.Tensor]:
        """The bytes of a tensor as uint8 pieces of at most 16 MiB, each valid until the next one."""
        with contextlib.ExitStack() as stack:
            descriptor = _open(place.file, stack)
            for done in range(0, place.nbytes, PIECE_BYTES):
                nbytes = min(PIECE_BYTES, place.nbytes - done)
                yield _bytes(descriptor, replace(place, start=place.start + done, nbytes=nbytes), self._buffer)


def _open(file: Path, stack: contextlib.ExitStack) -> int:
    try:
        descriptor = open_direct(file, os.O_RDONLY)
    except OSError as error:
        raise CorruptCheckpointError(f"{file} cannot be read ({error.strerror}); {cure(file)}") from error
    stack.callback(os.close, descriptor)
    return descriptor


def _bytes(descriptor: int, place: Place, buffer: torch.Tensor) -> torch.Tensor:
    try:
        data = read_at(descriptor, place.start, place.nbytes, buffer)
    except OSError as error:
        raise CorruptCheckpointError(f"{place.file} cannot be read ({error.strerror}); {cure(place.file)}") from error
    if len(data) != place.nbytes:
        raise CorruptCheckpointError(f"{place.file} ends early: it has become shorter; {cure(place.file)}")
    return data


def finite(data: torch.Tensor) -> bool:
    """Whether a tensor has no NaN and no infinity. Minimum and maximum show both, forty times faster than `isfinite`
    in bfloat16."""
    if not data.is_floating_point() or not data.numel():
        return True
    wide = data.float() if data.itemsize == 1 else data
    low, high = wide.aminmax()
    return bool(torch.isfinite(low) & torch.isfinite(high))


def finite_bytes(dtype_word: str, data: torch.Tensor) -> bool:
    """The same for raw bytes (uint8) of a tensor; True for a dtype without NaN and infinity."""
    dtype: Any = DTYPES.get(dtype_word, torch.uint8)
    aligned = data if data.storage_offset() % dtype.itemsize == 0 else data.clone()
    return finite(aligned.view(dtype))
