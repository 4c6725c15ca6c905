"""Restored weights against those that Transformers' own conversions make of the same published numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from checkpoint.native.encoding import CODES, DEVICE_PIECE, PIECE, SCALES, Encoding, Unencodable
from checkpoint.native.fp8 import Fp8
from checkpoint.native.mxfp4 import Mxfp4, values_of_words
from checkpoint.native.mxfp4_outputs_first import Mxfp4OutputsFirst

MXFP4, MXFP4_OUTPUTS_FIRST, FP8 = Mxfp4(), Mxfp4OutputsFirst(), Fp8()
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PIECES = (1, 100, PIECE, DEVICE_PIECE)
NAN = 0x7F


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Also the signs of zeros."""
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def published(numbers: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    return {CODES: numbers, SCALES: scales}


def encoded(encoding: Encoding, numbers: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    """One weight's parts."""
    found = encoding.encode(published(numbers.unsqueeze(0), scales.unsqueeze(0)))
    return {name: part[0] for name, part in found.items()}


def check_restored(
    encoding: Encoding, numbers: torch.Tensor, scales: torch.Tensor, expected: torch.Tensor, piece: int = PIECE
) -> None:
    """With torch, in pieces, and with the compiled routine, where it takes such weights."""
    parts = encoded(encoding, numbers, scales)
    shape = tuple(expected.shape)
    target = torch.full_like(expected.contiguous(), 7.0)
    scratch = torch.empty(encoding.scratch_bytes(shape, piece), dtype=torch.uint8)
    encoding.restore(target, parts, scratch, piece)
    assert same_bits(target, expected)
    if expected.dtype is torch.bfloat16 and encoding.restores_compiled(shape):
        encoding.routine()(target.fill_(7.0), parts, scratch)
        assert same_bits(target, expected)


def mxfp4(numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    found: torch.Tensor = convert_moe_packed_tensors(numbers.unsqueeze(0), scales.unsqueeze(0), dtype=dtype)
    return found[0]


def fp8(numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return Fp8Dequantize(None)._dequantize_one(numbers.view(torch.float8_e4m3fn), scales, dtype)


def every_number(shape: tuple[int, int]) -> torch.Tensor:
    """All E4M3 numbers but NaN, both zeros too."""
    codes = [code for code in range(256) if code & NAN != NAN]
    return (
        torch.tensor(codes, dtype=torch.uint8)
        .repeat(shape[0] * shape[1] // len(codes) + 1)[: shape[0] * shape[1]]
        .view(shape)
    )


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_of_mxfp4_with_every_scale(dtype: torch.dtype, piece: int) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(255, 16, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).view(255, 1).expand(255, 16).contiguous()
    expected = mxfp4(numbers, scales, dtype)
    check_restored(MXFP4, numbers, scales, expected, piece)
    check_restored(MXFP4_OUTPUTS_FIRST, numbers, scales, expected.t(), piece)


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_fp8_with_extreme_scales(dtype: torch.dtype, piece: int) -> None:
    numbers = every_number((16 * 6, 32 * 3))
    powers = [-149.0, -130.0, -126.0, -100.0, -12.3, -0.1, 0.0, 3.7, 90.0, 118.9, 110.0, -20.0, 1.0, 2.0, -7.0, 17.0]
    scales = torch.tensor(powers + powers[:2]).exp2().view(6, 3) * torch.tensor([1.0, -1.0, 1.0])
    expected = fp8(numbers, scales, dtype)
    check_restored(FP8, numbers, scales, expected, piece)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_with_scales_that_are_powers_of_two(dtype: torch.dtype) -> None:
    numbers, scales = every_number((32, 256)), torch.arange(246, dtype=torch.uint8)[: 32 * 8 - 10].repeat(2)[: 32 * 8]
    expected = fp8(numbers, scales.view(32, 8), dtype)
    check_restored(FP8, numbers, scales.view(32, 8), expected)


@given(st.integers(1, 9), st.integers(1, 5), st.sampled_from(DTYPES), st.integers(1, 400), st.integers(0, 1 << 30))
@settings(max_examples=40)
def test_mxfp4_of_any_size(out: int, blocks: int, dtype: torch.dtype, piece: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 256, (2 * out, blocks, 16), dtype=torch.uint8, generator=random)
    scales = torch.randint(0, 255, (2 * out, blocks), dtype=torch.uint8, generator=random)
    expected = mxfp4(numbers, scales, dtype)
    check_restored(MXFP4, numbers, scales, expected, piece)
    check_restored(MXFP4_OUTPUTS_FIRST, numbers, scales, expected.t(), piece)


@given(
    st.tuples(st.integers(1, 5), st.integers(1, 7)),
    st.tuples(st.integers(1, 5), st.integers(1, 7)),
    st.sampled_from(DTYPES),
    st.integers(1, 400),
    st.integers(0, 1 << 30),
)
@settings(max_examples=40)
def test_fp8_of_any_size(
    grid: tuple[int, int], block: tuple[int, int], dtype: torch.dtype, piece: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    shape = (grid[0] * block[0], grid[1] * block[1])
    numbers = torch.randint(0, NAN, shape, dtype=torch.uint8, generator=random)
    numbers |= torch.randint(0, 2, shape, dtype=torch.uint8, generator=random) << 7
    scales = (torch.rand(grid, generator=random) * 200 - 100).exp2()
    expected = fp8(numbers, scales, dtype)
    check_restored(FP8, numbers, scales, expected, piece)


@pytest.mark.parametrize("inferring", [True, False])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("encoding", [MXFP4, MXFP4_OUTPUTS_FIRST])
def test_threads_restore_the_same(encoding: Mxfp4, threads: int, blocks: int, inferring: bool) -> None:
    with torch.inference_mode(inferring):
        check_threads(encoding, threads, blocks)


def check_threads(encoding: Mxfp4, threads: int, blocks: int) -> None:
    numbers = torch.randint(0, 256, (6, blocks, 16), dtype=torch.uint8)
    scales = torch.randint(100, 130, (6, blocks), dtype=torch.uint8)
    up = mxfp4(numbers, scales, torch.bfloat16)
    expected = {"up": up if encoding.inputs_first else up.t(), "bias": torch.randn(6)}
    found = {name: torch.full_like(value.contiguous(), 7.0) for name, value in expected.items()}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        each = encoding.scratch_for([tuple(expected["up"].shape)], "cpu", threads)
        assert each[0] == threads
        parts = encoded(encoding, numbers, scales)
        native = {f"up.{name}": part for name, part in parts.items()} | {"bias": expected["bias"]}
        encoding.restore_into(found, native, torch.empty(each, dtype=torch.uint8))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(same_bits(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("shape", [(2880, 5760), (64, 6)])
def test_memory_to_restore_does_not_depend_on_the_threads_of_who_counts(shape: tuple[int, int]) -> None:
    before = torch.get_num_threads()
    for encoding in (MXFP4, FP8):
        found = []
        for here in (1, 3):
            torch.set_num_threads(here)
            try:
                found.append(encoding.scratch_for([shape], "cpu", 5))
            finally:
                torch.set_num_threads(before)
        assert found[0] == found[1]
        assert found[0][0] == 5
        assert encoding.scratch_for([shape], "cuda", 5)[0] == 1


def test_tables_are_counted() -> None:
    assert values_of_words(torch.device("cpu")).nbytes == MXFP4.table_bytes
    assert FP8.table_bytes == 0


def test_bytes_of_real_experts() -> None:
    """openai/gpt-oss-20b and deepseek-ai/DeepSeek-V3; biases and whole pages included."""
    assert ratio(MXFP4, (2880, 2 * 2880), (2880 // 32, 2 * 2880)) == pytest.approx(0.2656, abs=1e-4)
    assert ratio(FP8, (2 * 2048, 7168), (32, 56)) == pytest.approx(0.5001, abs=1e-4)


def ratio(encoding: Encoding, shape: tuple[int, int], grid: tuple[int, int]) -> float:
    """Bytes of an encoded weight over those in bfloat16."""
    codes = (shape[0] * shape[1] // 2,) if encoding is MXFP4 else shape
    kind = "uint8" if encoding is MXFP4 else "float32"
    assert encoding.fits_weight(shape, {CODES: ("uint8", codes), SCALES: (kind, grid)})
    size = {"uint8": 1, "float32": 4}[kind]
    return (torch.Size(codes).numel() + size * torch.Size(grid).numel()) / (2 * shape[0] * shape[1])


def test_what_is_not_mxfp4() -> None:
    numbers, scales = torch.zeros((1, 4, 2, 16), dtype=torch.uint8), torch.zeros((1, 4, 2), dtype=torch.uint8)
    with pytest.raises(Unencodable, match="not those of MXFP4"):
        MXFP4.encode(published(numbers[..., :8], scales))
    with pytest.raises(Unencodable, match="not those of MXFP4"):
        MXFP4.encode(published(numbers, scales[:, :3]))
    with pytest.raises(Unencodable, match="not uint8"):
        MXFP4.encode(published(numbers, scales.float()))
    with pytest.raises(Unencodable, match="a scale is NaN"):
        MXFP4.encode(published(numbers, scales + 255))


@pytest.mark.parametrize("code", [NAN, 0xFF])
def test_fp8_that_holds_nan(code: int) -> None:
    numbers = torch.zeros((1, 4, 4), dtype=torch.uint8)
    numbers[0, 2, 1] = code
    with pytest.raises(Unencodable, match="NaN"):
        FP8.encode(published(numbers, torch.ones(1, 2, 2)))


@pytest.mark.parametrize("scale", [2.0**119, float("inf"), float("nan"), -(2.0**125)])
def test_fp8_with_a_scale_that_is_too_large(scale: float) -> None:
    with pytest.raises(Unencodable, match="a scale is"):
        FP8.encode(published(torch.zeros((1, 4, 4), dtype=torch.uint8), torch.tensor([[[1.0], [scale]]])))


def test_fp8_whose_grid_does_not_divide_it() -> None:
    with pytest.raises(Unencodable, match="does not divide"):
        FP8.encode(published(torch.zeros((1, 6, 4), dtype=torch.uint8), torch.ones(1, 4, 1)))
