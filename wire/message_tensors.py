"""A tensor of a message: a description and bytes, so torch is not needed here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""No message is larger; larger tensors are sent in parts."""

MAX_ENCODED_BYTES = MAX_MESSAGE_BYTES + 64 * 1024
"""Room for `MAX_MESSAGE_BYTES` of tensors and a message's other fields."""

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1}
"""The dtypes a tensor on the wire may have, and their size."""

MAX_DIMS = 8

Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Tensor:
    """A dense, C-contiguous, little-endian tensor: `len(data)` is the product of `shape` times the dtype's size."""

    dtype: str
    shape: tuple[int, ...]
    data: Buffer


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A tensor as its library has it. Within a process it is passed as it is; only a codec reads its bytes."""

    local: Any
    describe: Callable[[Any], tuple[str, tuple[int, ...], Buffer]]
    """`local` -> the fields of a `Tensor`."""

    @property
    def dtype(self) -> str:
        return self.describe(self.local)[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.describe(self.local)[1]

    @property
    def data(self) -> Buffer:
        return self.describe(self.local)[2]
