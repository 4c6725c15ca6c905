"""The faster order of a product is used only where it changes no bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional

from checkpoint import kernels
from checkpoint.kernels import PROBE_ROWS, Linear, is_equal, linear_of
from odmoe.settings.declarations import KERNELS

SHAPES = [(192, 512), (512, 192), (2048, 768), (768, 2048), (577, 333)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.fixture
def always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU with AMX: the choice then depends on the comparison alone."""
    monkeypatch.setattr(kernels, "is_faster", lambda: True)


@pytest.mark.usefixtures("always_faster")
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("count", [1, 2, 5, 16, 31, 32, 33, 100])
def test_exact_equals_linear_bit_for_bit(inputs: int, outputs: int, count: int) -> None:
    linear, weight = Linear(), random(outputs, inputs)
    for seed in range(5):
        rows = random(count, inputs, seed=seed + 1)
        assert torch.equal(linear(rows, weight), functional.linear(rows, weight))


def test_there_is_a_kernel_for_each_choice() -> None:
    assert [linear_of(name).kernel for name in KERNELS] == list(KERNELS)


@pytest.mark.usefixtures("always_faster")
def test_fast_is_close_to_linear_where_it_is_not_equal() -> None:
    """K = 3584: oneDNN with AMX on one thread sums it in parts where the weight comes second."""
    weight, row = random(2048, 3584), random(1, 3584, seed=1)
    expected, result = functional.linear(row, weight), Linear("fast")(row, weight)
    assert result.shape == expected.shape
    torch.testing.assert_close(result, expected, rtol=2**-7, atol=0.05)


@pytest.mark.usefixtures("always_faster")
def test_another_order_of_summation_is_never_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two halves of the inputs, added at the end: of random bits hardly one differs, of the comparison nearly all."""

    def in_halves(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        halves = zip(rows.float().chunk(2, 1), weight.float().chunk(2, 1), strict=True)
        return sum(x @ w.t() for x, w in halves).to(rows.dtype)  # type: ignore[union-attr,return-value]

    weight = random(256, 512)
    monkeypatch.setattr(kernels, "weight_first", in_halves)
    assert not is_equal((1,), weight)
    assert not is_equal(PROBE_ROWS, weight)
    assert not Linear().is_weight_first(1, weight)
    assert Linear("fast").is_weight_first(1, weight)


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_rows_that_share_a_product_keep_their_bits(inputs: int, outputs: int) -> None:
    linear, weight = Linear(), random(outputs, inputs)
    if linear.is_rowwise(weight):
        rows = random(32, inputs, seed=1)
        for count in (2, 7, 32):
            own = torch.cat([functional.linear(row, weight) for row in rows[:count].split(1)])
            assert torch.equal(linear(rows[:count], weight), own)


def test_a_product_that_sums_several_rows_in_another_order_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, linear = random(256, 512), functional.linear

    def in_halves(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if len(rows) == 1:
            return linear(rows.float(), weight.float()).to(rows.dtype)
        halves = zip(rows.float().chunk(2, 1), weight.float().chunk(2, 1), strict=True)
        return sum(x @ w.t() for x, w in halves).to(rows.dtype)  # type: ignore[union-attr,return-value]

    monkeypatch.setattr(kernels, "is_faster", lambda: False)
    monkeypatch.setattr(functional, "linear", in_halves)
    assert not Linear().is_rowwise(weight)
    in_order = lambda rows, weight, bias: (rows.double() @ weight.t().double()).to(rows.dtype)  # noqa: E731
    monkeypatch.setattr(functional, "linear", in_order)
    assert Linear().is_rowwise(weight)
    assert not Linear().is_rowwise(weight.float())
    assert not Linear().is_rowwise(weight, torch.zeros(256))


def test_slower_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "is_faster", lambda: False)
    assert not Linear().is_weight_first(1, random(64, 64))
    assert not Linear("fast").is_weight_first(1, random(64, 64))


def test_a_large_weight_is_compared_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LARGEST_PROBE", 0)
    assert is_equal((1,), random(512, 192))
    monkeypatch.setattr(kernels, "weight_first", lambda rows, weight: torch.zeros(len(rows), len(weight)).to(rows))
    assert not is_equal((1,), random(512, 192))


def test_float32_and_bias_are_left_to_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(kernels, "weight_first")
    monkeypatch.delattr(torch, "mv")
    rows, weight, bias = torch.randn(1, 64), torch.randn(32, 64), torch.randn(32)
    assert torch.equal(Linear()(rows, weight), functional.linear(rows, weight))
    assert torch.equal(Linear()(rows, weight, bias), functional.linear(rows, weight, bias))
    with_bias = [tensor.to(torch.bfloat16) for tensor in (rows, weight, bias)]
    assert torch.equal(Linear()(*with_bias), functional.linear(*with_bias))


@pytest.mark.usefixtures("always_faster")
def test_linear_layers_compute_single_rows_with_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(192, 512, bias=False), torch.nn.Linear(512, 192)).to(torch.bfloat16)
    row, rows = random(1, 1, 192), random(1, 3, 192)
    expected, expected_rows = model(row), model(rows)
    Linear().replace_in(model)
    weights: list[torch.Tensor] = []
    mv = torch.mv
    monkeypatch.setattr(torch, "mv", lambda w, x: weights.append(w) or mv(w, x))
    assert torch.equal(model(row), expected)
    assert torch.equal(model(rows), expected_rows)
    assert [weight is model[0].weight for weight in weights] == [True], "several rows, and a bias, are left to linear"


@pytest.mark.usefixtures("always_faster")
def test_the_choice_is_made_anew_for_another_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of summation depends on it: 3584 to 2048 is equal with two threads and not with one."""
    linear, weight, row = Linear(), random(2048, 3584), random(1, 3584, seed=1)
    monkeypatch.setattr(linear, "is_weight_first", lambda count, weight: torch.get_num_threads() == 2)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        product = linear.bind(weight)
        torch.set_num_threads(1)
        monkeypatch.delattr(torch, "mv")
        assert torch.equal(product(row), functional.linear(row, weight))
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("always_faster")
def test_a_copy_of_a_linear_layer_uses_its_own_weights() -> None:
    """Gates are found by running a copy of a block in float32."""
    model = torch.nn.Linear(192, 512, bias=False).to(torch.bfloat16)
    Linear().replace_in(model)
    copied, row = copy.deepcopy(model).float(), torch.randn(1, 192)
    torch.nn.init.ones_(copied.weight)
    assert torch.equal(copied(row), functional.linear(row, torch.ones(512, 192)))
