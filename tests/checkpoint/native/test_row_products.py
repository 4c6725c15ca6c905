"""Products of a few rows with encoded weights against products in float64 with the restored weights."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.native import packed_vectors, row_routines, row_tasks, team
from checkpoint.native import row_products as products_of_rows
from checkpoint.native.encoding import CODES, SCALES, Encoding, Parts
from checkpoint.native.encodings import ENCODINGS, FP8, GGML_INTEGERS, INTEGERS, MXFP4
from checkpoint.native.integers import MINIMUM_UNITS, MINIMUMS, ORDER, SCALE_UNITS, ZEROS, packed_rows
from checkpoint.native.row_products import MOST_ROWS, RowScratch, chunk_width, multiply, row_products

Weight = tuple[str, tuple[int, int], dict[str, torch.Tensor]]
"""Encoding, shape and parts."""


KINDS = (
    (4, torch.float16, "zeros"),
    (8, torch.bfloat16, "middle"),
    (3, torch.float32, "minimums"),
    (5, torch.float16, "units"),
    (6, torch.float16, "middle"),
    (2, torch.bfloat16, "zeros"),
)
"""Bits, dtype of scales, and what offsets are. Each is compiled, for a second."""


@st.composite
def integers(draw: st.DrawFn) -> Weight:
    bits, kind, offsets = draw(st.sampled_from(KINDS))
    group = draw(st.sampled_from((16, 32, 64, 96, 128, 192, 256)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    rows, columns = draw(st.integers(1, 70)), math.lcm(group, 64) * draw(st.integers(1, 4))
    shape = rows, columns // group
    numbers = torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8, generator=random)
    parts = {CODES: packed_rows(numbers, bits), SCALES: (torch.randn(shape, generator=random) * 0.02).to(kind)}
    if offsets == "zeros":
        parts[ZEROS] = torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=random)
    elif offsets == "minimums":
        parts[MINIMUMS] = (torch.randn(shape, generator=random) * 0.1).to(kind)
    elif offsets == "units":
        steps = torch.randint(0, 64, shape, dtype=torch.uint8, generator=random)
        units = (torch.rand((rows, 1), generator=random) * 0.001).half()
        parts |= {SCALES: steps, MINIMUMS: steps.flip(0), SCALE_UNITS: units, MINIMUM_UNITS: units.flip(0)}
    return GGML_INTEGERS if MINIMUMS in parts else INTEGERS, (rows, columns), parts


@st.composite
def fp8(draw: st.DrawFn) -> Weight:
    random = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    grid = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    shape = 16 * grid[0], 32 * grid[1]
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
    codes[codes & 0x7F == 0x7F] = 0
    return FP8, shape, {CODES: codes, SCALES: torch.rand(grid, generator=random) * 0.01}


@st.composite
def mxfp4(draw: st.DrawFn) -> Weight:
    random = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    shape = 32 * draw(st.integers(1, 4)), 2 * draw(st.integers(16, 70))
    codes = torch.randint(0, 256, (shape[0] * shape[1] // 2,), dtype=torch.uint8, generator=random)
    scales = torch.randint(112, 124, (shape[0] // 32, shape[1]), dtype=torch.uint8, generator=random)
    return MXFP4, shape, {CODES: codes, SCALES: scales}


def restored(encoding: Encoding, shape: tuple[int, int], parts: Parts) -> torch.Tensor:
    """[in, out], in float64, by torch alone, and not rounded to the dtype of the scales."""
    encoding = ENCODINGS[GGML_INTEGERS] if encoding.name == INTEGERS else encoding
    dtype = torch.bfloat16 if encoding.name == MXFP4 else torch.float32
    target, piece = torch.empty(shape, dtype=dtype), shape[0] * shape[1]
    scratch = torch.empty(encoding.scratch_bytes(shape, piece), dtype=torch.uint8)
    encoding.restore(target, parts, scratch, piece)
    return target.double() if encoding.inputs_first else target.double().t()


@pytest.fixture(params=["one thread", "threads of torch", "other threads"], autouse=True)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(team, "LEAST_BYTES", 1 << 10)
    monkeypatch.setattr(team, "OTHER_THREAD_BYTES", 1 << 10)
    if request.param == "other threads":
        monkeypatch.setattr(team, "_torch_start", lambda: None)
    before = torch.get_num_threads()
    torch.set_num_threads(1 if request.param == "one thread" else 2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["what the processor has", "no products of bytes"])
def planes(request: pytest.FixtureRequest) -> Iterator[None]:
    """With AVX512-VNNI, if it is there, and as without."""
    if request.param == "what the processor has":
        yield
        return
    made = packed_vectors.dots_of_packed, row_routines.integer_product, row_tasks.integer_task
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_vectors, "has_planes", lambda width: False)
        patch.setattr(products_of_rows, "_kinds", {})
        for one in made:
            one.cache_clear()
        yield
    for one in made:
        one.cache_clear()


@pytest.mark.usefixtures("planes")
@pytest.mark.parametrize("count", [1, 5])
def test_groups_of_64_are_multiplied_as_in_float64(count: int) -> None:
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 16, (96, 256), dtype=torch.uint8, generator=draw)
    parts = {CODES: packed_rows(numbers, 4), SCALES: torch.rand((96, 4), generator=draw) * 0.02}
    check((INTEGERS, (96, 256), parts), torch.randn(count, 256, generator=draw).bfloat16())


@pytest.mark.slow
@pytest.mark.usefixtures("planes")
@given(
    weight=st.one_of(integers(), fp8(), mxfp4()),
    count=st.integers(1, MOST_ROWS),
    dtype=st.sampled_from((torch.bfloat16, torch.float16)),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=60, deadline=None)
def test_products_are_those_with_restored_weights(weight: Weight, count: int, dtype: torch.dtype, seed: int) -> None:
    name, (outputs, inputs), _ = weight
    inputs = outputs if ENCODINGS[name].inputs_first else inputs
    random = torch.Generator().manual_seed(seed)
    spread = torch.randn(count, 1, generator=random).exp()
    check(weight, (torch.randn(count, inputs, generator=random) * spread).to(dtype))


def check(weight: Weight, rows: torch.Tensor) -> None:
    """Compare the product of `rows` with that of the restored weight in float64, and with that of each row alone."""
    name, shape, parts = weight
    encoding = ENCODINGS[name]
    product = row_products(encoding, shape, parts, rows.dtype, RowScratch())
    if product is None:
        assert (name, bool(torch.cpu.get_capabilities().get("avx2"))) == (MXFP4, False)
        return
    full = restored(encoding, shape, parts)
    found, expected = product(rows), rows.double() @ full
    steps = rows.double().abs().amax(1, keepdim=True) / 65534 * full.abs().sum(0)
    sums = rows.double().abs() @ full.abs() * 2.0**-18 + 2.0**-24
    assert bool(((found.double() - expected).abs() <= expected.abs() * 2.0**-8 + steps + sums).all())
    assert torch.equal(torch.cat([product(row) for row in rows.split(1)]), found), "rows depend on each other"


@pytest.mark.parametrize("name", [INTEGERS, MXFP4])
def test_products_in_one_hand_over_have_the_bits_of_each_alone(name: str) -> None:
    """Whatever thread computes what."""
    made, scratch = torch.Generator().manual_seed(0), RowScratch()
    encoding, shape = ENCODINGS[name], (192, 320)
    inputs = shape[0] if encoding.inputs_first else shape[1]

    def weight() -> Parts:
        if name == MXFP4:
            codes = torch.randint(0, 256, (192 * 160,), dtype=torch.uint8, generator=made)
            return {CODES: codes, SCALES: torch.randint(112, 124, (6, 320), dtype=torch.uint8, generator=made)}
        numbers = torch.randint(0, 16, shape, dtype=torch.uint8, generator=made)
        return {CODES: packed_rows(numbers, 4), SCALES: torch.rand((192, 10), generator=made).half()}

    found = [row_products(encoding, shape, weight(), torch.bfloat16, scratch) for _ in range(5)]
    products = [product for product in found if product is not None]
    if name == MXFP4 and not torch.cpu.get_capabilities().get("avx2"):
        assert not products
        return
    counts = [1, 5, 2, 1, 4]
    rows = torch.randn(sum(counts), inputs, generator=made).bfloat16()
    alone = [product(some) for product, some in zip(products, rows.split(counts), strict=True)]
    assert torch.equal(multiply(products, rows, counts), torch.cat(alone))
    same = multiply(products, rows[:2], [2] * 5)
    assert torch.equal(same, torch.cat([product(rows[:2]) for product in products]))
    with pytest.raises(ValueError, match="3 rows for 5 products"):
        multiply(products, rows[:3], counts)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(value: float) -> None:
    parts = {CODES: torch.full((8, 32), 0x71, dtype=torch.uint8), SCALES: torch.ones(8, 2)}
    product = row_products(ENCODINGS[INTEGERS], (8, 64), parts, torch.bfloat16)
    assert product is not None
    rows = torch.ones(3, 64, dtype=torch.bfloat16)
    rows[1, 40] = value
    assert product(rows).isfinite().all(1).tolist() == [True, False, True]


def test_another_default_dtype_changes_nothing() -> None:
    """Transformers sets it for the whole process while a model is built."""
    parts = {CODES: torch.full((192, 32), 0x71, dtype=torch.uint8), SCALES: torch.ones(192, 2)}
    product = row_products(ENCODINGS[INTEGERS], (192, 64), parts, torch.bfloat16)
    assert product is not None
    rows = torch.ones(3, 64, dtype=torch.bfloat16)
    expected = product(rows)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = product(rows)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


def test_what_has_no_product() -> None:
    codes, scales = torch.zeros((4, 24), dtype=torch.uint8), torch.ones(4, 6)
    integers = ENCODINGS[INTEGERS]
    assert row_products(integers, (4, 48), {CODES: codes, SCALES: scales}, torch.bfloat16) is None, "groups of 8"
    parts = {CODES: codes, SCALES: scales[:, :3].contiguous()}
    assert row_products(integers, (4, 48), parts, torch.float32) is None
    order = torch.zeros((1, 48), dtype=torch.int16)
    assert row_products(integers, (4, 48), {**parts, ORDER: order}, torch.bfloat16) is None
    assert row_products(integers, (4, 48), parts, torch.bfloat16) is not None


@given(st.integers(1, 5000))
@settings(deadline=None)
def test_the_width_of_a_chunk(group: int) -> None:
    fits = [width for width in range(16, 257, 16) if group % width == 0]
    assert chunk_width(group) == max(fits, default=0)
