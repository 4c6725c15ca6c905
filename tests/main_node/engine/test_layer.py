"""One MoE layer's rows and outputs, against Transformers' own eager experts."""

from __future__ import annotations

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from checkpoint.family import parse_dtype
from main_node.engine.layer import LayerWork
from scheduler import types as t
from support.models.families import configuration
from wire.lent_threads import LentThreads

VISIT = t.Visit(1, 0, 0)


@pytest.fixture
def experts(request: pytest.FixtureRequest) -> MixtralExperts:
    """Eight, with random weights, in the test's dtype."""
    config = configuration("mixtral")
    config._experts_implementation = "eager"
    made, generator = MixtralExperts(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in made.parameters():
            value.copy_(torch.randn(value.shape, generator=generator) * 0.1)
    return made.to(parse_dtype(request.getfixturevalue("dtype")))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("index", [[[3, 3, 5]], [[5, 3, 3]], [[4, 4, 4]], [[6, 1, 3]], [[3, 3, 5], [5, 0, 3]]], ids=str)
def test_a_token_may_name_an_expert_twice(index: list[list[int]], dtype: str, experts: MixtralExperts) -> None:
    chosen = torch.tensor(index)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(len(index), experts.hidden_dim, generator=generator).to(experts.down_proj)
    weights = torch.rand(len(index), 3, generator=generator).to(hidden)
    work = LayerWork(hidden, chosen, weights, LentThreads())
    with torch.inference_mode():
        expected = experts(hidden, chosen, weights)
        for expert, count in work.rows:
            command = t.Compute(0, 0, t.ExpertId(0, expert), expert, VISIT, 0, count, True)
            rows, routing = work.rows_of(command)
            gate, up = (rows @ experts.gate_up_proj[expert].T).chunk(2, dim=-1)
            output = (experts.act_fn(gate) * up) @ experts.down_proj[expert].T * routing.view(count, 1)
            work.keep(command, output)
        combined = work.combine()
    assert combined.shape == hidden.shape
    assert torch.equal(combined, expected)


@pytest.mark.timeout(20)
def test_of_a_layer_whose_experts_are_all_there_the_output_is_partial_only_if_asked_for() -> None:
    work = LayerWork(torch.ones(1, 4), torch.tensor([[3, 5]]), torch.ones(1, 2), LentThreads())
    work.route((), (3, 5))
    assert work.partial(3600.0, if_all=False) is None  # at once, without their answers
    for expert in (3, 5):
        work.keep(t.Compute(0, 0, t.ExpertId(0, expert), expert, VISIT, 0, 1, True), torch.full((1, 4), float(expert)))
    assert work.partial(0.0, if_all=False) is None
    assert (found := work.partial(0.0)) is not None
    assert found.tolist() == [[8.0] * 4]
    work.route((), (3,))
    work.keep(t.Compute(0, 0, t.ExpertId(0, 3), 3, VISIT, 0, 1, True), torch.full((1, 4), 3.0))
    assert (found := work.partial(0.0, if_all=False)) is not None
    assert found.tolist() == [[3.0] * 4]
