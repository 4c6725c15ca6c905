"""Torch tensors as bytes and back, and memory that files can be read into directly."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import warnings
from typing import Protocol

import torch

from checkpoint.family import DTYPES, dtype_name
from scheduler.types import PAGE

warnings.filterwarnings("ignore", message="The given buffer is not writable")  # see tensor_from_bytes


class SentTensor(Protocol):
    """A tensor of a message (`wire.messages.Tensor`)."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def data(self) -> bytes | memoryview: ...


_ALL = DTYPES | {"int64": torch.int64, "int32": torch.int32, "uint8": torch.uint8}


def tensor_bytes(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], memoryview]:
    """(dtype, shape, bytes) of a tensor. Bytes of a contiguous tensor on the CPU are not copied."""
    flat = tensor.detach().cpu().contiguous()
    line = flat.as_strided((flat.numel(),), (1,))  # a single element may have any stride, and `view` takes only 1
    data = line.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
    return dtype_name(flat.dtype), tuple(flat.shape), data


def tensor_from_bytes(dtype: str, shape: tuple[int, ...], data: bytes | memoryview) -> torch.Tensor:
    """A tensor over `data`, uncopied. Treat it as read-only."""
    if not data:
        return torch.empty(0, dtype=_ALL[dtype]).view(shape)
    return torch.frombuffer(data, dtype=_ALL[dtype]).view(shape)


def received_tensor(sent: SentTensor) -> torch.Tensor:
    """A message's tensor, uncopied: the sender's own where it was sent within this process. Treat it as read-only."""
    local = getattr(sent, "local", None)
    return tensor_from_bytes(sent.dtype, sent.shape, sent.data) if local is None else local


def aligned_buffer(nbytes: int) -> torch.Tensor:
    """Page-aligned anonymous memory as uint8 [nbytes], for O_DIRECT.

    It is touched here, since first-touch faults during a read cost more than the read.
    """
    area = mmap.mmap(-1, max(nbytes, PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared has no huge pages
    if hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= 1 << 21:
        area.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(area, dtype=torch.uint8)[:nbytes]
    buffer.zero_()
    return buffer


def round_up(n: int, to: int = PAGE) -> int:
    """The smallest multiple of `to` that is at least `n`."""
    return -(-n // to) * to


def return_freed_memory() -> None:
    """To the kernel. glibc keeps what was freed in pieces of up to 32 MiB for this process. Other C libraries have
    nothing to call, and nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
