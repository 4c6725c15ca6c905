"""The quantised shadow: what it holds, and how far its experts are from the family's own."""

from __future__ import annotations

import logging
import runpy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from checkpoint import forms
from scheduler.errors import CheckpointError, ConfigError, StoreError
from scheduler.planning.shadow_bytes import SHADOW_BYTES
from shadow_node.quantise import (
    SCHEMES,
    HalfLinear,
    ShadowExperts,
    check_scheme,
    compute_dtype,
    module_bytes,
    quantise_linear,
    quantise_model,
)
from support.models import families

HIDDEN, INNER, EXPERTS, TOP_K = 192, 288, 4, 2  # INNER is not a multiple of 64, as in the demo model
FAMILIES = {
    "mixtral": {"intermediate_size": INNER, "num_local_experts": EXPERTS},
    "qwen3_moe": {"moe_intermediate_size": INNER, "num_experts": EXPERTS, "intermediate_size": 96},
    "gpt_oss": {"intermediate_size": INNER, "num_local_experts": EXPERTS},
    "nemotron_h": None,  # no gate: up_proj alone
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
# Relative error of the experts' output: rounding to 11 bits; to 8 bits twice over; to 16 levels.
BOUND = {"fp16": 2e-3, "int8": 3e-2, "nf4": 2e-1}
# Bytes a weight: a scale a row of float32 in int8; a scale a block of 64 or 32 (float32, or bfloat16 if packed) in nf4.
BYTES = {"fp16": (2.0, 2.0), "int8": (1.0, 1.03), "nf4": (0.53, 0.63)}


def build(name: str) -> Any:
    torch.manual_seed(0)
    fields = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 128,
        "num_experts_per_tok": TOP_K,
        "tie_word_embeddings": name == "mixtral",
    }
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **fields, **FAMILIES[name])).float().eval()


def experts_module(name: str) -> Any:
    """One layer's experts, with weights large enough for the clamps of gpt-oss to bite."""
    if name == "nemotron_h":
        from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

        config = AutoConfig.for_model(
            name, hidden_size=HIDDEN, moe_intermediate_size=INNER, n_routed_experts=EXPERTS, moe_latent_size=None
        )
        config._experts_implementation = "eager"
        module: Any = NemotronHExperts(config)
    else:
        module = build(name).model.layers[0].mlp.experts
        module.config._experts_implementation = "eager"
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    return module.eval()


def one(module: Any, expert: int) -> dict[str, Tensor]:
    return {name: value[expert].detach() for name, value in module.named_parameters()}


def shadow_of(module: Any, scheme: str, device: str = "cpu") -> ShadowExperts:
    experts = ShadowExperts(module, scheme, device)
    for number in range(module.num_experts):
        experts.add(number, one(module, number))
    return experts


def routed(tokens: int, among: int = EXPERTS) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    index = torch.stack([torch.randperm(among)[:TOP_K] for _ in range(tokens)])
    return torch.randn(tokens, HIDDEN), index, torch.rand(tokens, TOP_K)


def error(found: Tensor, true: Tensor) -> float:
    return float((found.float().cpu() - true).norm() / true.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", FAMILIES)
def test_experts_follow_the_familys_eager_forward(name: str, scheme: str, tokens: int, device: str) -> None:
    module = experts_module(name)
    hidden, index, weights = routed(tokens)
    with torch.inference_mode():
        true = module(hidden, index, weights)
        shadow = shadow_of(module, scheme, device)
        dtype = compute_dtype(scheme, device)
        found = shadow(hidden.to(device, dtype), index.to(device), weights.to(device, dtype))
    assert (found.shape, found.dtype) == (true.shape, dtype)
    assert error(found, true) < BOUND[scheme]
    assert scheme == "fp16" or error(found, true) > 1e-4, "is it quantised at all?"


def test_experts_may_have_fewer_bits_than_the_dense_part() -> None:
    """As with nf4 alone, or with HQQ's weights restored by the formula."""
    module, routes = experts_module("mixtral"), routed(5)
    with torch.inference_mode():
        assert torch.equal(shadow_of(module, "int8-nf4", "cpu")(*routes), shadow_of(module, "nf4", "cpu")(*routes))
        shadow = shadow_of(module, "int8-int2", "cpu")
        for parameter in module.parameters():
            for expert in parameter:
                packed = forms.quantise_weight(expert, 2)
                numbers = torch.cat([packed["packed"] >> shift & 3 for shift in (6, 4, 2, 0)]).float()
                restored = (numbers - packed["zero"].float()[:, None]) * packed["scale"].float()[:, None]
                expert.copy_(restored.reshape(-1)[: expert.numel()].view_as(expert))
        assert error(shadow(*routes), module(*routes)) < 1e-5
    full = sum(parameter.numel() for parameter in module.parameters())
    for parameter in module.parameters():
        parameter.data = torch.empty(0)
    assert module_bytes(shadow) / full == pytest.approx(SHADOW_BYTES["int8-int2"].expert, rel=0.1)
    weight, x = torch.randn(64, 128), torch.randn(3, 128)
    dense = [quantise_linear(weight, None, scheme, "cpu")(x) for scheme in ("int8", "int8-int2")]
    assert torch.equal(*dense)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_shrink_and_stay_shrunk(scheme: str, device: str) -> None:
    module = experts_module("mixtral")
    full = sum(p.numel() for p in module.parameters())
    module_bytes_before = module_bytes(module)
    shadow = shadow_of(module, scheme, device)
    for parameter in list(module.parameters()):
        parameter.data = torch.empty(0)  # as the checkpoint package empties them
    before = module_bytes(shadow)
    with torch.inference_mode():
        hidden, index, weights = routed(20)
        shadow(hidden.to(device, compute_dtype(scheme, device)), index.to(device), weights.to(device))
    low, high = BYTES[scheme]
    assert module_bytes_before == 4 * full
    assert low <= before / full <= high
    assert module_bytes(shadow) < 1.01 * before, "the first pass made a copy"  # int8 remembers outlier columns


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantised_layer_lets_go_of_its_source(scheme: str) -> None:
    whole = torch.randn(8, 64, 64).half()  # of which an expert is a view
    bias = torch.randn(8, 64)
    layer = quantise_linear(whole[3], bias[3], scheme, "cpu")
    assert module_bytes(layer) < whole[3].nbytes + bias.nbytes, "of a view, all that it is a view of is held"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(1, 192), (48, 100), (33, 66), (64, 96), (32, 64)])
def test_any_shape_can_be_quantised(shape: tuple[int, int], scheme: str) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(shape), torch.randn(shape[0]), torch.randn(2, 5, shape[1])
    with torch.inference_mode():
        y = quantise_linear(weight, bias, scheme, "cpu")(x)
    assert error(y, nn.functional.linear(x, weight, bias)) < BOUND[scheme]


def test_a_weight_too_large_for_int2_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"\(32, 64\) to int2: a scale of 1e\+06 is beyond float16"):
        quantise_linear(torch.full((32, 64), 1e6), None, "int8-int2", "cpu", of_expert=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_may_come_in_half_precision(scheme: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(64, 128).to(dtype), torch.randn(3, 128)
    with torch.inference_mode():
        assert error(quantise_linear(weight, None, scheme, "cpu")(x), x @ weight.float().T) < BOUND[scheme]


def test_only_experts_that_are_hit_are_computed() -> None:
    module = experts_module("mixtral")
    shadow = shadow_of(module, "fp16")
    computed: list[int] = []
    for number, layers in shadow.experts.items():
        layers[0].register_forward_hook(lambda *_, number=int(number): computed.append(number))  # type: ignore[misc]
    none = EXPERTS  # an index past the last expert is nobody's
    hidden = torch.randn(2, HIDDEN)
    out = shadow(hidden, torch.tensor([[3, none], [3, 1]]), torch.ones(2, 2))
    assert computed == [1, 3]
    assert torch.isfinite(out).all()


def test_a_hit_on_an_expert_that_was_never_added_is_named() -> None:
    module = experts_module("mixtral")
    shadow = ShadowExperts(module, "fp16", "cpu")
    with pytest.raises(StoreError, match="no expert 2"):
        shadow(torch.randn(1, HIDDEN), torch.tensor([[2]]), torch.ones(1, 1))


def test_parameters_that_the_arithmetic_does_not_know_are_refused() -> None:
    module = experts_module("gpt_oss")
    tensors = one(module, 0)
    shadow = ShadowExperts(module, "int8", "cpu")
    for wrong in ({**tensors, "scale": torch.ones(1)}, {k: v for k, v in tensors.items() if k != "down_proj_bias"}):
        with pytest.raises(CheckpointError, match="down_proj_bias"):
            shadow.add(0, wrong)
    with pytest.raises(CheckpointError, match="meta"):
        quantise_linear(torch.empty(4, 4, device="meta"), None, "fp16", "cpu")


def test_unknown_scheme_is_refused() -> None:
    module = experts_module("mixtral")
    for call in (
        lambda: check_scheme("int3"),
        lambda: compute_dtype("int3", "cpu"),
        lambda: quantise_linear(torch.ones(2, 2), None, "int3", "cpu"),
        lambda: quantise_model(None, "int3", torch.device),
        lambda: ShadowExperts(module, "int3", "cpu"),
    ):
        with pytest.raises(ConfigError, match=r"'int3'.*fp16, int8, nf4"):
            call()


def test_compute_dtypes() -> None:
    assert {compute_dtype(scheme, "cpu") for scheme in SCHEMES} == {torch.float32}
    assert [compute_dtype(s, "cuda:1") for s in SCHEMES] == [torch.float16, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_the_dense_model_is_quantised_in_place(name: str, scheme: str) -> None:
    model = build(name)
    for layer in model.model.layers:
        for key in dict(layer.mlp.experts.named_parameters()):
            delattr(layer.mlp.experts, key)
    kept = {n: p.data_ptr() for n, p in model.named_parameters() if "_proj" not in n}
    linears = sum(p.numel() for n, p in model.named_parameters() if n.endswith("_proj.weight"))
    rest = module_bytes(model) - 4 * linears
    quantise_model(model, scheme, lambda _: torch.device("cpu"))

    exact = [n for n, m in model.named_modules() if type(m) is nn.Linear]
    assert exact == ["lm_head"]
    wanted = {"fp16": "HalfLinear", "int8": "Linear8bitLt", "nf4": "Linear4bit"}[scheme]
    assert {type(layer.self_attn.q_proj).__name__ for layer in model.model.layers} == {wanted}
    now = dict(model.named_parameters())
    assert {n: now[n].data_ptr() for n in kept} == kept
    assert {now[n].dtype for n in kept} == {torch.float32}
    low, high = BYTES[scheme]
    assert low <= (module_bytes(model) - rest) / linears <= high


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_gate_that_is_a_linear_layer_stays_as_it_is(scheme: str) -> None:
    """Qwen's, of the shared expert."""
    model = families.build("qwen2_moe")
    gates = {n: m.weight.detach().clone() for n, m in model.named_modules() if n.endswith("shared_expert_gate")}
    assert len(gates) == 4
    quantise_model(model, scheme, lambda _: torch.device("cpu"))
    for name, weight in gates.items():
        gate = model.get_submodule(name)
        assert type(gate) is nn.Linear
        assert torch.equal(gate.weight, weight)


def test_each_storage_counts_once() -> None:
    model = build("mixtral")  # its head is tied to its embeddings
    layer = model.model.layers[0]
    assert module_bytes(model) == 4 * (sum(p.numel() for p in model.parameters()) + 2 * 16)  # + rotary frequencies
    assert module_bytes([model, layer, layer]) == module_bytes(model)
    half = HalfLinear(torch.zeros(10, 100).half()[:2], None)  # a view keeps the whole
    assert module_bytes(half) == 2000
    assert module_bytes([]) == module_bytes(nn.Linear(4, 4, device="meta")) == 0


def test_bitsandbytes_is_quiet_about_the_cast_only(caplog: pytest.LogCaptureFixture) -> None:
    layer = quantise_linear(torch.randn(64, 64), None, "int8", "cpu")
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    with caplog.at_level(logging.WARNING):
        layer(torch.randn(2, 64))
        logger.warning("another matter")
    assert [record.message for record in caplog.records] == ["another matter"]


@pytest.mark.parametrize("name", ["quantise", "model", "node"])
def test_importing_does_not_import_bitsandbytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # whoever imports it gets an ImportError
    runpy.run_module(f"shadow_node.{name}")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_in_any_number_of_dimensions(scheme: str) -> None:
    """Latent attention multiplies [1, 1, T, r]."""
    layer = quantise_linear(torch.randn(48, 64), torch.randn(48), scheme, "cpu")
    rows = torch.randn(6, 64)
    with torch.inference_mode():
        expected = layer(rows)
        for shape in ((1, 6), (2, 3), (1, 1, 6), (1, 2, 3)):
            assert torch.equal(layer(rows.view(*shape, 64)), expected.view(*shape, 48))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_int8_is_what_bitsandbytes_own_layer_computes(dtype: torch.dtype, bias: bool) -> None:
    """To the last bit, with outliers and without, whatever the dimensions of the first call are."""
    torch.manual_seed(0)
    weight, offset = torch.randn(40, 96), torch.randn(40) if bias else None
    for shape in ((1, 2, 3, 96), (1, 96), (5, 96), (1, 7, 96), (2, 1, 96)):
        layer = quantise_linear(weight, offset, "int8", "cpu")
        for scale in (1.0, 9.0):
            x = (torch.randn(shape) * scale).to(dtype)
            found = layer(x)
            own = type(layer).forward(layer, x.flatten(0, -2)).unflatten(0, shape[:-1])
            assert found.dtype == own.dtype
            assert torch.equal(found, own)
            assert torch.equal(layer(x), found)
