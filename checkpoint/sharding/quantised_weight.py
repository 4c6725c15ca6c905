"""A dense weight in its published format, dequantised some rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from checkpoint.formats.base import PublishedFormat
from checkpoint.formats.unreadable import DAMAGED, unreadable
from checkpoint.place import Place
from checkpoint.sharding.weights import DTYPES, buffer_bytes, read
from checkpoint.tensors import aligned_buffer
from scheduler.errors import CorruptCheckpointError

_PIECE_BYTES = 1 << 25
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight `name` of the checkpoint, which becomes the model's parameter `target`, or a part of that.

    Dequantised it has the properties of a `Place`.
    """

    name: str
    words: dict[str, str]
    """The tensors it is stored in: word of the quantiser -> name."""
    parts: dict[str, Place]
    """Where they are, by word."""
    target: str
    model: Any
    """The model without its bytes. Its parameter's dtype is that of the dequantised weight."""
    format: PublishedFormat
    quantizer: Any

    @property
    def file(self) -> Path:
        return next(iter(self.parts.values())).file

    @property
    def shape(self) -> tuple[int, ...]:
        return self.format.shape(self.parts)

    @property
    def dtype(self) -> str:
        """In the words of safetensors."""
        return _NAMES[self._dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self._dtype.itemsize

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.get_parameter_or_buffer(self.target).dtype
        return dtype

    def pieces(self) -> Iterator[torch.Tensor]:
        """The bytes of the weight as uint8, some rows at a time. Raises CheckpointError, DoesNotFitError."""
        shape = self.shape
        rows = self.format.rows(self.parts)
        step = shape[0] if rows is None else max(1, _PIECE_BYTES * shape[0] // self.nbytes // rows) * rows
        for first in range(0, shape[0], step):
            last = min(first + step, shape[0])
            places = self.parts if rows is None else self.format.row_parts(self.parts, first, last)
            found = self._dequantised(places)
            if found.shape != (last - first, *shape[1:]) or found.dtype != self._dtype:
                raise CorruptCheckpointError(
                    f"{self.format.path}: {self.name} is dequantised to {list(found.shape)}, not to {list(shape)}"
                )
            yield found.contiguous().view(-1).view(torch.uint8)

    def _dequantised(self, places: dict[str, Place]) -> torch.Tensor:
        tensors = read(places, aligned_buffer(buffer_bytes(places)))
        for word, tensor in tensors.items():
            self.format.check(word, self.words[word], tensor)
        try:
            return self.format.dequantise(self.quantizer, tensors, self.target, self.model)
        except (*DAMAGED, RuntimeError, MemoryError) as error:
            what = f"{self.format.path}: {', '.join(self.words.values())} cannot be dequantised"
            raise unreadable(what, error) from error
