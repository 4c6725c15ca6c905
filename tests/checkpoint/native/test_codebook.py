"""Codes with a table: restored weights against numpy, whose arithmetic has the order that the formats' tools have."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.native.codebook import FACTORS, SCALE_OFFSETS, SCALE_TABLE, TABLE, UNIT_STARTS, scale_units_of
from checkpoint.native.encoding import CODES, DEVICE_PIECE, PIECE, SCALES
from checkpoint.native.encodings import CODEBOOK, ENCODINGS
from checkpoint.native.integers import MINIMUM_UNITS, MINIMUMS, SCALE_UNITS, ZEROS, packed_rows
from support.models.restored_weights import check_restored, shapes

ENCODING = ENCODINGS[CODEBOOK]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.slow
@given(
    bits=st.sampled_from([2, 4, 8]),
    groups=st.sampled_from([(1, 8), (3, 16), (5, 8), (9, 32), (300, 8)]),
    rows=st.sampled_from([2, 6, 94]),
    matrices=st.integers(1, 2),
    kind=st.sampled_from(["floats", "named", "nested", "signed", "with minimums"]),
    factor=st.sampled_from([None, 1.0, 0.007874015718698502]),
    dtypes=st.tuples(*[st.sampled_from(DTYPES)] * 3),
    threads=st.integers(1, 3),
    piece=st.sampled_from([1, 100, PIECE, DEVICE_PIECE]),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=100, deadline=None)
def test_weights_of_any_size(
    bits: int,
    groups: tuple[int, int],
    rows: int,
    matrices: int,
    kind: str,
    factor: float | None,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    threads: int,
    piece: int,
    seed: int,
) -> None:
    """Scales that have a unit together end in any row, of any thread's share."""
    random = torch.Generator().manual_seed(seed)
    (count, each), (dtype, of_scales, of_factors) = groups, dtypes
    numbers = torch.randint(0, 1 << bits, (rows, count * each), dtype=torch.uint8, generator=random)
    table = torch.randn(matrices, 1 << bits, generator=random)
    scales, levels, minimums = some_scales(kind, rows, count, matrices, of_scales, random)
    parts = {CODES: packed_rows(numbers, bits), TABLE: table, **scales}
    values = table.numpy()[numpy.arange(rows)[:, None] * matrices // rows, numbers.numpy()]
    expected = torch.from_numpy(values * levels.repeat(each, 1) - minimums.repeat(each, 1))
    if factor is not None:
        parts[FACTORS] = torch.full((matrices, 1), factor, dtype=of_factors)
        expected = expected.to(of_factors).float() * parts[FACTORS][0].float()
    published = {name: part.unsqueeze(0) for name, part in parts.items()}
    stored = {name: part[0] for name, part in ENCODING.encode(published).items()}
    check_restored(ENCODING, stored, expected.to(dtype), threads, piece)


def some_scales(
    kind: str, rows: int, groups: int, matrices: int, dtype: torch.dtype, random: torch.Generator
) -> tuple[dict[str, torch.Tensor], numpy.ndarray, numpy.ndarray]:
    """Parts, and the scales and minimums that they stand for, float32 [rows, groups]."""
    steps = torch.randint(0, 256, (rows, groups), dtype=torch.uint8, generator=random)
    none = numpy.zeros((rows, groups), numpy.float32)
    units, others = torch.randn(2, rows, 1, generator=random).half()
    if kind == "floats":
        scales = torch.randn(rows, groups, generator=random).to(dtype)
        return {SCALES: scales}, scales.float().numpy(), none
    if kind == "signed":
        signed = steps.view(torch.int8)
        return {SCALES: signed, SCALE_UNITS: units}, signed.float().numpy() * units.float().numpy(), none
    if kind == "with minimums":
        low, high = (steps & 15).float().numpy(), (steps >> 4).float().numpy()
        found = {SCALES: steps, SCALE_UNITS: units, MINIMUM_UNITS: others}
        return found, low * units.float().numpy(), high * others.float().numpy()
    table = torch.randn(matrices, 256, generator=random)
    each, found = rows // matrices * groups, {SCALES: steps, SCALE_TABLE: table}
    levels = table.gather(1, steps.view(matrices, -1).long()).numpy()
    if kind == "nested":
        units = torch.rand(matrices, -(-each // 256), generator=random)
        of_matrices = [scale_units_of(some, rows // matrices, groups) for some in units]
        found |= {name: torch.cat([one[name] for one in of_matrices]) for name in of_matrices[0]}
        found[SCALE_OFFSETS] = torch.randn(matrices, 1, generator=random)
        levels = levels * units.numpy().repeat(256, 1)[:, :each] + found[SCALE_OFFSETS].numpy()
    return found, levels.reshape(rows, groups), none


def parts_of(**more: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Of a weight of 4 rows and 32 columns in 2 groups. None: without that part."""
    codes, table = torch.zeros((4, 16), dtype=torch.uint8), torch.zeros(2, 16)
    found = {CODES: codes, TABLE: table, SCALES: BYTES, SCALE_TABLE: torch.zeros(2, 256), **more}
    return {name: part for name, part in found.items() if part is not None}


BYTES, HALVES = torch.zeros((4, 2), dtype=torch.uint8), torch.ones((4, 1), dtype=torch.float16)
STEPS = {SCALE_TABLE: None, SCALE_UNITS: HALVES, MINIMUM_UNITS: HALVES}


@pytest.mark.parametrize(
    "parts",
    [
        parts_of(codes=torch.zeros((4, 8), dtype=torch.uint8)),
        parts_of(codes=torch.zeros((2, 32), dtype=torch.uint8)),
        parts_of(codes=torch.zeros((4, 12), dtype=torch.uint8), table=torch.zeros(2, 8)),
        parts_of(table=torch.zeros(2, 15)),
        parts_of(table=torch.zeros(3, 16), scale_table=torch.zeros(3, 256)),
        parts_of(table=torch.zeros(2, 16).half()),
        parts_of(table=None),
        parts_of(scale_table=torch.zeros(1, 256)),
        parts_of(scale_table=torch.zeros(2, 255)),
        parts_of(scale_table=None),
        parts_of(scales=BYTES[:2]),
        parts_of(scales=torch.zeros((4, 8), dtype=torch.uint8)),
        parts_of(scales=torch.ones(4, 2)),
        parts_of(scales=torch.zeros((4, 2), dtype=torch.int8), scale_table=None),
        parts_of(scale_units=torch.ones(4, 2)),
        parts_of(scale_units=torch.ones(2, 1)),
        parts_of(scale_units=HALVES),
        parts_of(scale_units=torch.ones(4, 1), unit_starts=BYTES[:, :1]),
        parts_of(scale_units=torch.ones(4, 2), unit_starts=BYTES[:2, :1]),
        parts_of(scale_units=torch.ones(4, 2), unit_starts=BYTES),
        parts_of(unit_starts=BYTES[:, :1]),
        parts_of(**STEPS, unit_starts=BYTES[:, :1]),
        parts_of(scale_offsets=torch.ones(1, 1)),
        parts_of(**STEPS | {MINIMUM_UNITS: None}),
        parts_of(**STEPS | {MINIMUM_UNITS: HALVES.float()}),
        parts_of(**STEPS | {SCALE_UNITS: HALVES.repeat(1, 3)}),
        parts_of(**STEPS, scale_offsets=torch.ones(2, 1)),
        parts_of(factors=torch.ones(1, 1)),
        parts_of(**{MINIMUMS: torch.ones(4, 2)}),
        parts_of(**{ZEROS: BYTES}),
    ],
)
def test_parts_that_do_not_fit_a_weight(parts: dict[str, torch.Tensor]) -> None:
    """Compiled routines check no bounds. The manifest that lists these may be a stranger's."""
    full = {"up": ("float32", (4, 32))}
    nested = {SCALE_UNITS: torch.ones(4, 2), UNIT_STARTS: BYTES[:, :1], SCALE_OFFSETS: torch.ones(2, 1)}
    for fits in ({}, {SCALE_UNITS: torch.ones(4, 1)}, nested, STEPS):
        assert ENCODING.fits(full, shapes(parts_of(**fits)))
    assert not ENCODING.fits(full, shapes(parts))
