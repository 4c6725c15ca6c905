"""Products of several requests that are made together."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional

from checkpoint import kernels, linear_batch
from checkpoint.coroutine import Coroutine
from checkpoint.kernels import Linear
from checkpoint.linear_batch import BatchLinear, LinearCall, batch_linear, keeps_bits, meeting, multiply
from support.nodes.passes_together import run_together


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def together(model: torch.nn.Module, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.inference_mode():
        return run_together([Coroutine(lambda rows=rows: model(rows)) for rows in inputs])


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of calls of each product."""
    made: list[int] = []
    original = linear_batch.multiply

    def counted(calls: list[LinearCall], exact: bool) -> list[torch.Tensor]:
        made.append(len(calls))
        return original(calls, exact)

    monkeypatch.setattr(linear_batch, "multiply", counted)
    return made


class Network(torch.nn.Module):
    """Rows through `first`, `middle` (only where the first number is positive) and `last`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (torch.nn.Linear(6, 6, bias=bias) for bias in (True, False, True))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.first(rows)
        if rows.flatten()[0] > 0:
            hidden = self.middle(hidden)
        output: torch.Tensor = self.last(hidden.relu())
        return output


def test_rows_of_any_shape_are_one_product() -> None:
    layer = torch.nn.Linear(6, 4)
    (module,) = batch_linear(layer)
    inputs = [random(1, 3, 6, seed=1), random(6, seed=2), random(2, 1, 6, seed=3), random(0, 6)]
    outputs = multiply([LinearCall(module, rows) for rows in inputs])
    for rows, output in zip(inputs, outputs, strict=True):
        torch.testing.assert_close(output, rows @ layer.weight.t() + layer.bias)
        assert output.is_contiguous()


def test_no_rows_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_batch, "_is_rowwise", lambda module: True)
    layer = torch.nn.Linear(6, 4, bias=False)
    (module,) = batch_linear(layer)
    for counts in ((0, 1), (0, 0), (0, 40, 0)):
        outputs = multiply([LinearCall(module, random(1, count, 6)) for count in counts])
        assert [len(output[0]) for output in outputs] == list(counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_stays(dtype: torch.dtype) -> None:
    (module,) = batch_linear(torch.nn.Linear(6, 4, bias=False).to(dtype))
    outputs = multiply([LinearCall(module, random(1, 6).to(dtype)), LinearCall(module, random(2, 6).to(dtype))])
    assert [output.dtype for output in outputs] == [dtype, dtype]


def test_calls_of_two_modules_are_refused() -> None:
    modules = batch_linear(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)))
    with pytest.raises(ValueError, match="different linear layers"):
        multiply([LinearCall(module, random(1, 6)) for module in modules])


def test_outside_of_coroutines_nothing_changes() -> None:
    model, rows = Network(), random(1, 3, 6)
    expected = model(rows)
    assert len(batch_linear(model)) == 3
    assert torch.equal(model(rows), expected)


def test_a_lone_pass_is_computed_as_before(counts: list[int]) -> None:
    model, rows = Network(), random(1, 1, 6).abs()
    expected = model(rows)
    batch_linear(model)
    assert torch.equal(together(model, [rows])[0], expected)
    assert counts == [1, 1, 1]


def test_passes_meet_at_each_layer(counts: list[int]) -> None:
    model, inputs = Network(), [random(1, count, 6, seed=count).abs() for count in (1, 4, 2)]
    expected = [model(rows) for rows in inputs]
    batch_linear(model)
    for output, alone in zip(together(model, inputs), expected, strict=True):
        torch.testing.assert_close(output, alone)
    assert counts == [3, 3, 3]


def test_a_pass_that_skips_a_layer_waits_for_those_behind(counts: list[int]) -> None:
    model, inputs = Network(), [random(1, 6, seed=1).abs(), -random(1, 6, seed=2).abs(), random(2, 6, seed=3).abs()]
    expected = [model(rows) for rows in inputs]
    batch_linear(model)
    for output, alone in zip(together(model, inputs), expected, strict=True):
        torch.testing.assert_close(output, alone)
    assert counts == [3, 2, 3]


def test_the_furthest_behind_are_next() -> None:
    first, second = batch_linear(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)))
    calls = [LinearCall(module, random(1, 6)) for module in (second, first, second, first)]
    assert meeting(calls) == [1, 3]


def test_an_error_of_one_pass_is_raised() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 6))
    batch_linear(model)

    def fail() -> torch.Tensor:
        raise KeyError(model(random(1, 6)).shape)

    with torch.inference_mode(), pytest.raises(KeyError):
        run_together([Coroutine(lambda: model(random(1, 6))), Coroutine(fail)])


def test_products_of_other_classes_stay_as_they_are() -> None:
    """Of an int8 layer, outliers of one row change the scale of the others."""

    class Quantised(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return functional.linear(input, self.weight.round(), self.bias)

    class Named(torch.nn.Linear):
        pass

    model = torch.nn.ModuleList([Quantised(6, 6), Named(6, 6), torch.nn.Embedding(6, 6), torch.nn.Linear(6, 6)])
    assert batch_linear(model) == [model[1], model[3]]
    assert isinstance(model[1], Named)
    assert type(model[0]) is Quantised


def test_single_rows_keep_their_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "is_faster", lambda: True)
    model = torch.nn.Sequential(torch.nn.Linear(192, 512, bias=False)).to(torch.bfloat16)
    Linear().replace_in(model)
    batch_linear(model)
    weights: list[torch.Tensor] = []
    mv = torch.mv
    monkeypatch.setattr(torch, "mv", lambda weight, row: weights.append(weight) or mv(weight, row))
    row = random(1, 1, 192).to(torch.bfloat16)
    with torch.inference_mode():
        expected = functional.linear(row, model[0].weight)
    assert torch.equal(together(model, [row])[0], expected)
    assert torch.equal(model(row), expected)
    assert len(weights) == 2


def test_several_rows_take_the_layers_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "is_faster", lambda: True)
    model = torch.nn.Sequential(torch.nn.Linear(192, 512, bias=False)).to(torch.bfloat16)
    Linear().replace_in(model)
    batch_linear(model)
    firsts: list[int] = []
    original = kernels.weight_first

    def counted(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        firsts.append(len(rows))
        return original(rows, weight)

    monkeypatch.setattr(kernels, "weight_first", counted)
    inputs = [random(1, count, 192, seed=count).to(torch.bfloat16) for count in (1, 2, 2)]
    outputs = together(model, inputs)
    assert firsts[-1] == 5
    expected = functional.linear(torch.cat(inputs, 1), model[0].weight)
    assert torch.equal(torch.cat(outputs, 1), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "outputs"), [(192, 512), (2048, 96), (3584, 64), (64, 7)])
@pytest.mark.parametrize("bias", [True, False])
def test_exact_products_keep_every_bit(dtype: torch.dtype, inputs: int, outputs: int, bias: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(inputs, outputs, bias=bias)).to(dtype)
    texts = [random(1, count, inputs, seed=count).to(dtype) for count in (1, 40, 1, 5, 1, 30)]
    texts += [random(1, 1, inputs, seed=seed).to(dtype) for seed in range(100, 110)]
    with torch.inference_mode():
        expected = [model(rows) for rows in texts]
        batch_linear(model)
        outputs_ = run_together([Coroutine(lambda rows=rows: model(rows)) for rows in texts], exact=True)
    assert all(torch.equal(output, alone) for output, alone in zip(outputs_, expected, strict=True))


def test_few_rows_share_an_exact_product(monkeypatch: pytest.MonkeyPatch) -> None:
    (module,) = batch_linear(torch.nn.Linear(6, 4))
    products: list[int] = []
    linear = Linear.__call__

    def counted(self: Linear, rows: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        products.append(len(rows))
        return linear(self, rows, *weights)

    monkeypatch.setattr(Linear, "__call__", counted)
    calls = [LinearCall(module, random(1, count, 6, seed=count)) for count in (1, 30, 2, 40, 3, 4)]
    for rowwise, exact, expected in (
        (True, True, [31, 7]),
        (True, False, [31, 7]),
        (False, True, []),
        (False, False, [80]),
    ):
        products.clear()
        monkeypatch.setattr(Linear, "is_rowwise", lambda *_, rowwise=rowwise: rowwise)
        outputs = multiply(calls, exact)
        assert products == expected, "the others have products of their own"
        assert keeps_bits(calls) == rowwise
        assert keeps_bits(calls[:1])
        for call, output in zip(calls, outputs, strict=True):
            torch.testing.assert_close(output, functional.linear(call.rows, module.weight, module.bias))


def test_a_layer_can_be_batched_twice_and_copied() -> None:
    layer: Any = torch.nn.Sequential(torch.nn.Linear(6, 6))
    assert batch_linear(layer) == batch_linear(layer)
    copied = copy.deepcopy(layer)
    torch.nn.init.ones_(copied[0].weight)
    assert isinstance(copied[0], BatchLinear)
    rows = random(1, 6)
    outputs = together(copied, [rows, rows])
    torch.testing.assert_close(outputs[1], functional.linear(rows, torch.ones(6, 6), copied[0].bias))
