"""Gates: what they said against what the model's experts were sent, and other choices against each family's formula."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from checkpoint.family import experts_modules
from checkpoint.gates import Gates
from scheduler.errors import UnsupportedFamilyError
from support.models import families

TOKENS = torch.tensor([[5, 17, 3, 88, 41, 9, 9, 60, 2, 71, 33, 12]])
FAMILIES = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe"),
    *("granitemoe", "lfm2_moe"),
)


def build(name: str) -> Any:
    """A tiny model of a family, every weight random."""
    return families.build(name).eval()


def sent(model: Any, run: Callable[[], Any]) -> dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Layer -> what Transformers' own code gave the experts: rows, index, weights."""
    found: dict[int, Any] = {}
    handles = [
        module.register_forward_pre_hook(lambda _, args, layer=layer: found.update({layer: args}))
        for layer, (_, module) in experts_modules(model).items()
    ]
    with torch.inference_mode():
        run()
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_explain_what_the_experts_were_sent(name: str, dtype: torch.dtype) -> None:
    model = build(name).to(dtype)
    before = sent(model, lambda: model(TOKENS))
    gates = Gates(model)
    got = sent(model, lambda: model(TOKENS))
    assert gates.layers == tuple(got)
    close = 1e-5 if dtype is torch.float32 else 0.02
    for layer, (hidden, index, weights) in got.items():
        assert all(torch.equal(a, b) for a, b in zip(before[layer], got[layer], strict=True)), "the model was changed"
        scores = gates.scores(layer)
        assert scores.dtype is torch.float32
        ratio = weights.float() / scores.gather(1, index)
        assert torch.allclose(ratio, ratio[:, :1].expand_as(ratio), rtol=close), "not proportional in a row"
        with torch.inference_mode():
            top = gates.ranked_at(layer, hidden).topk(index.shape[1]).indices
            kept = gates.scores(layer).clone()
            assert torch.equal(gates.scores_of(layer, hidden), kept)
            gates.scores_of(layer, torch.randn_like(hidden))
        assert torch.equal(gates.scores(layer), kept), "asking a gate changed what it said last"
        assert torch.equal(top.sort(1).values, index.sort(1).values)
        if gates.rule(layer).plain:
            top = scores.topk(index.shape[1]).indices
            assert torch.equal(top.sort(1).values, index.sort(1).values)


def softmax_over_chosen(logits: torch.Tensor, experts: list[int]) -> torch.Tensor:
    return logits[experts].softmax(-1)


def softmax_over_all(logits: torch.Tensor, experts: list[int]) -> torch.Tensor:
    return logits.softmax(-1)[experts]


def deepseek_v3(logits: torch.Tensor, experts: list[int]) -> torch.Tensor:
    scores = logits.sigmoid()[experts]
    return 2.5 * scores / scores.sum()


FORMULAS: dict[str, Callable[[torch.Tensor, list[int]], torch.Tensor]] = {
    "mixtral": softmax_over_chosen,  # a softmax over all, normalised over the chosen, is one over the chosen
    "gpt_oss": softmax_over_chosen,
    "qwen2_moe": softmax_over_all,  # norm_topk_prob is False
    "deepseek_v2": softmax_over_all,  # routed_scaling_factor is 1
    "deepseek_v3": deepseek_v3,
}


def linear(model: Any, layer: int, rows: torch.Tensor) -> torch.Tensor:
    """A gate's logits [T, E] by its weights alone."""
    name = experts_modules(model)[layer][0].rpartition(".")[0]
    block = model.get_submodule(name)
    gate = getattr(block, "gate", None) or block.router
    logits: torch.Tensor = rows @ gate.weight.detach().T
    return logits + gate.bias.detach() if getattr(gate, "bias", None) is not None else logits


@pytest.mark.parametrize("name", FORMULAS)
def test_another_choice_is_weighed_by_the_familys_formula(name: str) -> None:
    model = build(name)
    gates = Gates(model)
    got = sent(model, lambda: model(TOKENS))
    layer, (hidden, index, weights) = next(iter(got.items()))
    own = [tuple(row) for row in index.tolist()]
    assert gates.reweigh(layer, index, weights, own)[1] is weights
    others = itertools.cycle([(0, 1, 2), (7, 3), (5,), None, (6, 4, 0)])
    chosen = [next(others) or row for row in own]
    chosen[3] = own[3][::-1]  # the same experts in another order are no other choice
    new_index, new = gates.reweigh(layer, index, weights, chosen)
    logits = linear(model, layer, hidden)
    changed = 0
    for row, experts in enumerate(chosen):
        if set(experts) == set(own[row]):
            assert torch.equal(new_index[row], index[row])
            assert torch.equal(new[row], weights[row])
            continue
        changed += 1
        count = len(experts)
        assert new_index[row, :count].tolist() == list(experts)
        assert torch.allclose(new[row, :count], FORMULAS[name](logits[row], list(experts)), rtol=1e-4, atol=1e-6)
        assert not new[row, count:].any()
    assert changed > 5
    assert torch.allclose(weights[0], FORMULAS[name](logits[0], list(own[0])), rtol=1e-4), "the formula itself is wrong"


def test_a_scaling_factor_is_found() -> None:
    model = build("deepseek_v2")
    for _, module in experts_modules(model).values():
        del module
    for block in model.modules():
        if hasattr(block, "routed_scaling_factor"):
            block.routed_scaling_factor = 16.0
    gates = Gates(model)
    rule = gates.rule(gates.layers[0])
    assert (rule.score_function, rule.normalised, rule.scale) == ("softmax", False, 16.0)


def test_kept_experts_keep_their_weights_where_others_do_not_matter() -> None:
    model = build("qwen2_moe").to(torch.bfloat16)
    gates = Gates(model)
    layer, (_, index, weights) = next(iter(sent(model, lambda: model(TOKENS)).items()))
    first, second, third = index[0].tolist()
    other = next(e for e in range(8) if e not in (first, second, third))
    chosen = [(first, other, third), *map(tuple, index[1:].tolist())]
    new_index, new = gates.reweigh(layer, index, weights, chosen)
    assert new_index[0].tolist() == [first, other, third]
    assert torch.equal(new[0, [0, 2]], weights[0, [0, 2]])
    assert torch.equal(new[1:], weights[1:])


@pytest.mark.parametrize(("name", "words"), [("phimoe", "PhimoeTopKRouter"), ("zaya", "no module that returns")])
def test_a_family_whose_weights_are_of_another_kind_is_refused(name: str, words: str) -> None:
    with pytest.raises(UnsupportedFamilyError, match=rf"{name}: .*{words}.*take a system"):
        Gates(build(name))


def test_an_untrained_gate_says_nothing() -> None:
    model = build("mixtral")
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight.zero_()
    with pytest.raises(UnsupportedFamilyError, match="MixtralTopKRouter"):
        Gates(model)


def test_the_digest_is_of_the_gates() -> None:
    model = build("mixtral").to(torch.bfloat16)
    digest = Gates(model).digest()
    assert Gates(model.float()).digest() == digest
    with torch.no_grad():
        model.model.layers[2].mlp.gate.weight[3, 5] += 1
    assert Gates(model).digest() != digest


def test_aside_leaves_the_last_scores() -> None:
    model = build("mixtral")
    gates = Gates(model)
    sent(model, lambda: model(TOKENS))
    said = gates.scores(1).clone()
    with gates.aside() as heard:
        sent(model, lambda: model(TOKENS.flip(1)))
    assert torch.equal(gates.scores(1), said)
    assert set(heard) == {0, 1, 2, 3}
    assert not torch.equal(gates.ranked_scores(1, heard), said)
