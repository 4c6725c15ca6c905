"""Checksums of the tensors in a message: made where their values were, compared where they arrive."""

from __future__ import annotations

import ctypes
from typing import Any

import xxhash

from wire.messages import LocalTensor, Tensor


def tensor_checksum(*tensors: Tensor | LocalTensor) -> int:
    """xxh3-64 of the tensors' bytes, in this order: 1 to 2^64 - 1, since 0 in a message means that none was made.

    A contiguous torch tensor in host memory is read where it is. For a row of a decoding step that takes half a
    microsecond; to describe the tensor first, as a codec does, would take eight times as long.
    """
    first, *others = tensors
    if not others:
        return xxhash.xxh3_64_intdigest(_bytes_of(first)) or 1
    digest = xxhash.xxh3_64(_bytes_of(first))
    for tensor in others:
        digest.update(_bytes_of(tensor))
    return digest.intdigest() or 1


def _bytes_of(tensor: Tensor | LocalTensor) -> Any:
    """A buffer, valid for as long as `tensor` is."""
    if isinstance(tensor, Tensor):
        return tensor.data
    local: Any = tensor.local
    if local.is_cpu and local.is_contiguous() and (nbytes := local.nbytes):
        return (ctypes.c_char * nbytes).from_address(local.data_ptr())
    return tensor.data
