"""Plain products compute an expert only where they equal the family's own module bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from checkpoint import family
from checkpoint.expert import ExpertArithmetic, Views
from checkpoint.kernels import Linear
from support.models.families import FAMILIES, configuration

DTYPES = ("float32", "bfloat16")
EXPERT = 5


def arithmetic_of(name: str, dtype: str) -> tuple[ExpertArithmetic, dict[int, Any]]:
    """With the meta experts modules of each layer, for their shapes."""
    config = configuration(name)
    modules = family.experts_modules(family.meta_model(config, family.parse_dtype(dtype)))
    return ExpertArithmetic(config.to_dict(), dtype), {layer: module for layer, (_, module) in modules.items()}


def random_views(module: Any) -> Views:
    generator = torch.Generator().manual_seed(0)
    return {
        key: torch.randn(value.shape[1:], generator=generator).mul(0.1).to(value.dtype)
        for key, value in family.expert_parameters("experts", module).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_products_compute_every_family(name: str, dtype: str) -> None:
    arithmetic, modules = arithmetic_of(name, dtype)
    assert modules
    assert all(arithmetic.is_plain(layer, random_views(module)) for layer, module in modules.items())


class Mixtral:
    """Transformers' own module of all experts, with random weights, and the arithmetic of one of them."""

    def __init__(self, dtype: str) -> None:
        self.arithmetic, modules = arithmetic_of("mixtral", dtype)
        config = configuration("mixtral")
        config._experts_implementation = "eager"
        self.module = MixtralExperts(config).to(family.parse_dtype(dtype))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for value in self.module.parameters():
                value.copy_(torch.randn(value.shape, generator=generator) * 0.1)
        self.views = {key: value.detach()[EXPERT] for key, value in self.module.named_parameters()}
        self.layer = next(iter(modules))
        self.hidden = torch.randn(3, config.hidden_size, generator=generator).to(self.views["down_proj"])
        self.weights = torch.rand(3, generator=generator).to(self.hidden)

    def is_equal(self, views: Views) -> bool:
        """Whether what is bound computes what the module does for the expert."""
        index = torch.full((3, 1), EXPERT)
        with torch.inference_mode():
            expected = self.module(self.hidden, index, self.weights.view(3, 1))
        return torch.equal(self.arithmetic.bind(self.layer, views)(self.hidden, self.weights), expected)


forward = MixtralExperts.forward


def doubled(module: Any, *given: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = 2 * forward(module, *given)
    return result


def without_activation(module: Any, rows: torch.Tensor) -> torch.Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return gate * up


def of_what_only_the_whole_module_has(module: Any, rows: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = module.limit * rows
    return result


def not_of_rows(module: Any) -> None: ...


def of_another_width(module: Any, rows: torch.Tensor) -> torch.Tensor:
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("method", "other"),
    [
        ("forward", doubled),
        ("_apply_gate", without_activation),
        ("_apply_gate", of_what_only_the_whole_module_has),
        ("_apply_gate", not_of_rows),
        ("_apply_gate", of_another_width),
    ],
    ids=["forward", "gate", "AttributeError", "TypeError", "RuntimeError"],
)
def test_a_module_that_computes_otherwise_than_declared_computes_itself(
    method: str, other: Callable[..., Any], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixtral's own forward does not call `_apply_gate`; plain products do."""
    monkeypatch.setattr(MixtralExperts, method, other)
    made = Mixtral(dtype)
    assert made.is_equal(made.views)
    assert not made.arithmetic.is_plain(made.layer, made.views)


@pytest.mark.parametrize("nothing", [0.0, float("nan")])
@pytest.mark.parametrize("alike", [True, False])
def test_a_slot_without_an_expert_decides_nothing(nothing: float, alike: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first real expert in it does."""
    if not alike:
        monkeypatch.setattr(MixtralExperts, "_apply_gate", without_activation)
    made = Mixtral("float32")
    slot = {key: torch.full_like(view, nothing) for key, view in made.views.items()}
    assert not made.arithmetic.is_plain(made.layer, slot)
    made.arithmetic.bind(made.layer, slot)
    for key, view in made.views.items():
        slot[key].copy_(view)
    assert made.arithmetic.is_plain(made.layer, slot) == alike
    assert made.is_equal(slot)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "inner"), [(192, 288), (2048, 768), (64, 32), (512, 3584)])
def test_calls_share_a_computation_only_where_every_bit_stays(dtype: str, hidden: int, inner: int) -> None:
    config = configuration("mixtral")
    config.hidden_size, config.intermediate_size = hidden, inner
    arithmetic = ExpertArithmetic(config.to_dict(), dtype)
    generator = torch.Generator().manual_seed(0)
    views = {
        "gate_up_proj": torch.randn(2 * inner, hidden, generator=generator).div(50).to(family.parse_dtype(dtype)),
        "down_proj": torch.randn(hidden, inner, generator=generator).div(50).to(family.parse_dtype(dtype)),
    }
    shared = arithmetic.is_rowwise(0, views)
    if dtype == "float32":
        assert not shared
    if not shared:
        return
    compute = arithmetic.bind(0, views)
    for seed in range(5):
        rows = torch.randn(32, hidden, generator=generator).to(views["down_proj"])
        weights = torch.rand(32, generator=generator).to(rows)
        own = torch.cat([compute(row, one) for row, one in zip(rows.split(1), weights.split(1), strict=True)])
        for count in (2, 5, 8, 31, 32):
            assert torch.equal(compute(rows[:count], weights[:count]), own[:count]), seed


def test_calls_do_not_share_where_an_activation_looks_at_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Mixtral("bfloat16")
    monkeypatch.setattr(Linear, "is_rowwise", lambda *_: True)
    monkeypatch.setattr(ExpertArithmetic, "is_plain", lambda *_: True)
    monkeypatch.setattr(MixtralExperts, "_apply_gate", lambda _, rows: rows.chunk(2, dim=-1)[0] - rows.mean())
    assert not made.arithmetic.is_rowwise(made.layer, made.views)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "gelu"])
def test_an_activation_whose_bits_hang_on_the_place_is_noticed(activation: str) -> None:
    """Torch computes the end of a tensor with another function, of which few values differ in 16 bits."""
    config = configuration("mixtral")
    config.hidden_act = activation
    arithmetic = ExpertArithmetic(config.to_dict(), "bfloat16")
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[values.isfinite()]
    function = ACT2FN[activation]
    alone = torch.cat([function(value) for value in values.split(1)])
    assert arithmetic.is_elementwise(0) is torch.equal(function(values), alone)
