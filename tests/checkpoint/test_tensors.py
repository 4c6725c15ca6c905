"""Tensors as bytes and back, and memory that starts on a page."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.tensors import PAGE, aligned_buffer, round_up, tensor_bytes, tensor_from_bytes
from wire.messages import DTYPE_BYTES

pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable")
DTYPES = {name: getattr(torch, name) for name in DTYPE_BYTES}
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def of_random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bit pattern, NaN payloads and denormals included."""
    count = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return bits.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def raw(tensor: torch.Tensor) -> bytes:
    """Element by element, in C order."""
    return b"".join(bytes(item.reshape(1).view(torch.uint8).tolist()) for item in tensor.reshape(-1).unbind())


@settings(deadline=None)
@given(st.sampled_from(sorted(DTYPES)), shapes, st.integers(0, 1000), st.randoms(), st.booleans())
def test_there_and_back(name: str, shape: tuple[int, ...], seed: int, random: object, as_bytes: bool) -> None:
    tensor = of_random_bits(DTYPES[name], shape, seed)
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    tensor = tensor.permute(order)
    dtype, found, data = tensor_bytes(tensor)
    assert (dtype, found) == (name, tuple(tensor.shape))
    assert bytes(data) == raw(tensor)
    again = tensor_from_bytes(dtype, found, bytes(data) if as_bytes else data)
    assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
    assert raw(again) == raw(tensor)


@settings(deadline=None)
@given(st.sampled_from(sorted(DTYPES)), st.integers(0, 6), st.integers(1, 4), st.booleans())
def test_views_with_gaps(name: str, start: int, step: int, across: bool) -> None:
    whole = of_random_bits(DTYPES[name], (9, 7), 5)
    part = whole[:, start::step] if across else whole[start::step]
    dtype, shape, data = tensor_bytes(part)
    assert raw(tensor_from_bytes(dtype, shape, data)) == raw(part)


def test_the_bytes_are_the_tensors_own() -> None:
    tensor = torch.zeros(3, dtype=torch.bfloat16)
    dtype, shape, data = tensor_bytes(tensor)
    assert tensor_from_bytes(dtype, shape, data).data_ptr() == tensor.data_ptr()


def test_gradients_do_not_hinder() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    assert raw(tensor_from_bytes(*tensor_bytes(parameter))) == raw(parameter.detach())


@pytest.mark.parametrize("shift", [0, 1, 2, 3, 5, 7])
def test_bytes_from_any_address(shift: int) -> None:
    """A message's tensor lies where the message put it."""
    tensor = of_random_bits(torch.float32, (4, 3), 1)
    message = memoryview(bytes(shift) + raw(tensor))[shift:]
    assert raw(tensor_from_bytes("float32", (4, 3), message)) == raw(tensor)


@pytest.mark.parametrize(("shape", "nbytes"), [((3,), 8), ((3,), 16), ((2, 2), 0)])
def test_bytes_that_do_not_fill_the_shape(shape: tuple[int, ...], nbytes: int) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        tensor_from_bytes("float32", shape, bytearray(nbytes))


@settings(deadline=None, max_examples=50)
@given(st.one_of(st.integers(0, 20_000), st.sampled_from([PAGE, PAGE + 1, 1 << 21, (1 << 21) + 5])))
def test_aligned_buffer_starts_on_a_page_and_is_zero(nbytes: int) -> None:
    buffer = aligned_buffer(nbytes)
    assert buffer.dtype == torch.uint8
    assert buffer.shape == (nbytes,)
    assert buffer.untyped_storage().data_ptr() % PAGE == 0
    assert nbytes == 0 or buffer.data_ptr() % PAGE == 0
    assert not buffer.any()
    buffer.fill_(7)
    assert int(buffer.sum(dtype=torch.int64)) == 7 * nbytes


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 20))
def test_round_up(n: int, to: int) -> None:
    found = round_up(n, to)
    assert found % to == 0
    assert 0 <= found - n < to


def test_bytes_of_one_element_of_a_wider_tensor() -> None:
    """Its stride is that of the row it was taken from."""
    weights = torch.tensor([[0.25, 0.5, 0.75]], dtype=torch.bfloat16)
    for column, expected in enumerate(weights[0].tolist()):
        dtype, shape, data = tensor_bytes(weights.T[column])
        assert (dtype, shape) == ("bfloat16", (1,))
        assert torch.frombuffer(bytearray(data), dtype=torch.bfloat16).tolist() == [expected]


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_goes_back_to_the_kernel() -> None:
    """Pieces too small for a mapping of their own; the last one is kept, so that the heap's end does not fall."""
    code = """
from pathlib import Path
from checkpoint.tensors import return_freed_memory

def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

pieces = [b"x" * 65536 for _ in range(3200)]
last = pieces.pop()
del pieces
before = held()
return_freed_memory()
print(before - held())
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert int(done.stdout) > 150
