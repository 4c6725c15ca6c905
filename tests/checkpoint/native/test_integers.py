"""Integers with group scales: restored weights against numpy, and all blocks of GGUF against the package gguf."""

from __future__ import annotations

from functools import partial

import gguf
import numpy
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.formats.gguf_blocks import encoding_of, published_blocks
from checkpoint.native.encoding import CODES, DEVICE_PIECE, PIECE, SCALES, Shapes, Unencodable
from checkpoint.native.encodings import ENCODINGS, GGML_CODEBOOK, GGML_INTEGERS, INTEGERS
from checkpoint.native.integers import MINIMUM_UNITS, MINIMUMS, ORDER, ZEROS, packed_rows
from support.models.restored_weights import check_restored, shapes

ROUNDED, EXACT = ENCODINGS[INTEGERS], ENCODINGS[GGML_INTEGERS]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
TABLE_KINDS = ("Q2_K", "IQ4_NL", "IQ4_XS", "MXFP4")
SCALE_BYTES = {"Q2_K": [81, 83], "Q3_K": [109], "Q6_K": [209], "MXFP4": []}
"""The high bytes of a block's scales in float16, where it has others than its first one or two."""


@pytest.mark.slow
@given(
    bits=st.integers(1, 8),
    groups=st.sampled_from([(1, 8), (3, 16), (5, 8), (2, 40)]),
    rows=st.sampled_from([2, 6, 14]),
    scale=st.sampled_from(DTYPES),
    dtype=st.sampled_from(DTYPES),
    with_zeros=st.booleans(),
    orders=st.sampled_from([0, 1, 2]),
    threads=st.integers(1, 3),
    piece=st.sampled_from([1, 100, PIECE, DEVICE_PIECE]),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=150, deadline=None)
def test_weights_of_any_size(
    bits: int,
    groups: tuple[int, int],
    rows: int,
    scale: torch.dtype,
    dtype: torch.dtype,
    with_zeros: bool,
    orders: int,
    threads: int,
    piece: int,
    seed: int,
) -> None:
    """A product of a difference and a scale has as few bits as float64 has."""
    random = torch.Generator().manual_seed(seed)
    count, each = groups
    numbers = torch.randint(0, 1 << bits, (rows, count * each), dtype=torch.uint8, generator=random)
    scales = (
        torch.randn(rows, count, generator=random) * (torch.rand(rows, count, generator=random) * 24 - 16).exp2()
    ).to(scale)
    published = {CODES: packed_rows(numbers, bits), SCALES: scales}
    zeros = torch.full((rows, count), 1 << bits - 1)
    if with_zeros:
        zeros = torch.randint(0, 1 << bits, (rows, count), generator=random)
        published[ZEROS] = zeros.to(torch.uint8)
    group = (torch.arange(count * each) // each).expand(rows, -1)
    if orders:
        order = torch.randint(0, count, (orders, count * each), generator=random)
        published[ORDER] = order.int()
        group = order.repeat_interleave(rows // orders, 0)
    parts = {name: part[0] for name, part in ROUNDED.encode({n: p.unsqueeze(0) for n, p in published.items()}).items()}
    exact = (numbers.double() - zeros.gather(1, group)) * scales.double().gather(1, group)
    check_restored(ROUNDED, parts, exact.to(scale).to(dtype), threads, piece)


@pytest.mark.parametrize("kind", [*KINDS, *TABLE_KINDS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_gguf(kind: str, dtype: torch.dtype) -> None:
    """Random bytes, but for scales that are finite."""
    values, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    rows = numpy.random.default_rng(0).integers(0, 256, (6, 3 * size), dtype=numpy.uint8)
    blocks = torch.from_numpy(rows.copy()).view(6, 3, size)
    for high in SCALE_BYTES.get(kind, [1] if kind in ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS") else [1, 3]):
        blocks[..., high] &= 0xBF  # below 2 in size
    expected = torch.from_numpy(gguf.dequantize(blocks.flatten(1).numpy(), Kind[kind])).to(dtype)
    published = published_blocks(Kind[kind], blocks.flatten(1).unsqueeze(0))
    encoding = ENCODINGS[encoding_of([kind])]
    parts = {name: part[0] for name, part in encoding.encode(published).items()}
    assert tuple(expected.shape) == (6, 3 * values)
    assert encoding is (EXACT if kind in KINDS else ENCODINGS[GGML_CODEBOOK])
    check_restored(encoding, parts, expected, 2)
    assert sum(part.nbytes for name, part in parts.items() if "table" not in name) <= 1.05 * rows.nbytes


def test_other_blocks_of_gguf_are_named() -> None:
    with pytest.raises(Unencodable, match="IQ2_XS; these are kept: Q4_0, "):
        published_blocks(Kind.IQ2_XS, torch.zeros((1, 2, 74), dtype=torch.uint8))


def parts_of(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    codes = torch.zeros((4, 16), dtype=torch.uint8)
    return {CODES: codes, SCALES: torch.ones(4, 2, dtype=torch.float16), **more}


BYTES = torch.zeros((4, 2), dtype=torch.uint8)


@pytest.mark.parametrize(
    "parts",
    [
        parts_of(codes=torch.zeros((4, 17), dtype=torch.uint8)),
        parts_of(codes=torch.zeros((2, 32), dtype=torch.uint8)),
        parts_of(codes=torch.zeros((4, 16), dtype=torch.int8)),
        parts_of(scales=torch.ones(4, 3)),
        parts_of(scales=torch.ones(4, 64)),
        parts_of(scales=torch.ones(2, 2)),
        parts_of(scales=BYTES),
        parts_of(zeros=BYTES[:, :1]),
        parts_of(zeros=torch.ones(4, 2)),
        parts_of(order=torch.zeros((1, 31), dtype=torch.int16)),
        parts_of(order=torch.zeros((3, 32), dtype=torch.int16)),
        parts_of(order=torch.zeros((1, 32), dtype=torch.uint8)),
        parts_of(minimums=BYTES),
        parts_of(minimums=torch.ones(4, 2), zeros=BYTES),
        parts_of(minimum_units=torch.ones(4, 1, dtype=torch.float16)),
        parts_of(scales=BYTES, scale_units=torch.ones(4, 3, dtype=torch.float16)),
        parts_of(scales=BYTES, scale_units=torch.ones(4, 1)),
        parts_of(more=BYTES),
    ],
)
def test_parts_that_do_not_fit_a_weight(parts: dict[str, torch.Tensor]) -> None:
    """Compiled routines check no bounds. The manifest that lists these may be a stranger's."""
    full = {"up": ("float32", (4, 32))}
    assert EXACT.fits(full, shapes(parts_of()))
    assert EXACT.fits(full, shapes(parts_of(minimums=BYTES, minimum_units=torch.ones(4, 1, dtype=torch.float16))))
    assert not EXACT.fits(full, shapes(parts))
    assert not ROUNDED.fits(full, shapes(parts_of(**{MINIMUMS: torch.ones(4, 2)})))
    assert MINIMUM_UNITS in EXACT.more_parts


def test_an_order_out_of_bounds_reads_nothing_else() -> None:
    """A blob may be damaged: the nearest group is taken."""
    parts = parts_of(order=torch.tensor([[9, -9] * 16]).to(torch.int16), scales=torch.tensor([[1.0, 2.0]] * 4).half())
    scratch = torch.empty(ROUNDED.scratch_bytes((4, 32), PIECE), dtype=torch.uint8)
    for restore in (ROUNDED.routine(), partial(ROUNDED.restore, piece=PIECE)):
        found = torch.empty(4, 32, dtype=torch.bfloat16)
        restore(found, parts, scratch)
        assert found.unique(dim=0).tolist() == [[-16.0, -8.0] * 16]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({SCALES: torch.full((1, 4, 2), float("nan"))}, "scales of a weight hold NaN"),
        ({ORDER: torch.full((1, 1, 32), 2, dtype=torch.int32)}, "inputs of group 2"),
        ({ORDER: torch.full((1, 1, 32), -1, dtype=torch.int32)}, "2 groups"),
        ({CODES: torch.zeros(4, 16, dtype=torch.uint8)}, "not rows"),
    ],
)
def test_what_cannot_be_encoded(changed: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(Unencodable, match=words):
        ROUNDED.encode({name: part.unsqueeze(0) for name, part in parts_of().items()} | changed)
    with pytest.raises(Unencodable, match="12 columns, which 5 bits"):
        packed_rows(torch.zeros((2, 12), dtype=torch.uint8), 5)
    with pytest.raises(Unencodable, match="number 16, which 4 bits"):
        packed_rows(torch.full((2, 16), 16, dtype=torch.uint8), 4)


@pytest.mark.parametrize(
    ("group", "bits", "zeros", "published"),
    [
        (128, 4, True, 4 + 20 / 128),  # AWQ and GPTQ
        (32, 4, False, 4 + 16 / 32),  # moonshotai/Kimi-K2-Thinking
        (128, 8, True, 8 + 24 / 128),
    ],
)
def test_bytes_of_real_experts(group: int, bits: int, zeros: bool, published: float) -> None:
    """Of matrices of 2048 x 7168."""
    shape = (2048, 7168)
    parts: Shapes = {
        f"up.{CODES}": ("uint8", (2048, 7168 * bits // 8)),
        f"up.{SCALES}": ("float16", (2048, 7168 // group)),
    }
    if zeros:
        parts[f"up.{ZEROS}"] = ("uint8", (2048, 7168 // group))
    assert ROUNDED.fits({"up": ("bfloat16", shape)}, parts)
    nbytes = sum(torch.Size(of).numel() * (2 if kind == "float16" else 1) for kind, of in parts.values())
    assert nbytes * 8 <= 1.01 * published * torch.Size(shape).numel()
