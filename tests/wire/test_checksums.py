"""A tensor's checksum is that of its bytes, however the message holds it, and differs for each bit that is flipped."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
import xxhash

from checkpoint.tensors import tensor_bytes
from wire.checksums import tensor_checksum
from wire.messages import DTYPE_BYTES, LocalTensor, Tensor


def local(tensor: torch.Tensor) -> LocalTensor:
    return LocalTensor(tensor, tensor_bytes)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("shape", [(1, 7), (3, 64), (1, 4096), (300, 128)])
def test_it_is_the_digest_of_the_bytes(dtype: str, shape: tuple[int, ...]) -> None:
    nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
    data = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
    tensor = torch.from_numpy(data.copy()).view(getattr(torch, dtype)).view(shape)
    expected = xxhash.xxh3_64_intdigest(data.tobytes())
    assert tensor_checksum(local(tensor)) == expected
    assert tensor_checksum(Tensor(dtype, shape, data.tobytes())) == expected
    assert tensor_checksum(Tensor(dtype, shape, data.data)) == expected


def test_several_are_taken_in_order() -> None:
    rows, weights = torch.randn(3, 16), torch.randn(3)
    expected = xxhash.xxh3_64_intdigest(rows.numpy().tobytes() + weights.numpy().tobytes())
    assert tensor_checksum(local(rows), local(weights)) == expected
    assert tensor_checksum(local(weights), local(rows)) != expected


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).T,
        torch.arange(12.0).view(3, 4)[:, 1:3],
        torch.arange(12.0).view(3, 4)[1:],
        torch.ones(1, 4).expand(3, 4),
        torch.empty(0, 4),
        torch.tensor([[5.0]]).as_strided((1, 1), (7, 3)),
    ],
    ids=["transposed", "columns", "rows", "expanded", "empty", "odd strides"],
)
def test_the_layout_in_memory_makes_no_difference(tensor: torch.Tensor) -> None:
    assert tensor_checksum(local(tensor)) == xxhash.xxh3_64_intdigest(tensor.contiguous().numpy().tobytes())


def test_every_flipped_bit_is_seen() -> None:
    data = bytearray(random.Random(2).randbytes(96))
    before = tensor_checksum(Tensor("uint8", (96,), bytes(data)))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert tensor_checksum(Tensor("uint8", (96,), bytes(data))) != before
        data[bit // 8] ^= 1 << bit % 8
    assert tensor_checksum(Tensor("uint8", (96,), bytes(data))) == before


def test_it_is_never_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", lambda data: 0)
    assert tensor_checksum(local(torch.ones(2))) == 1
