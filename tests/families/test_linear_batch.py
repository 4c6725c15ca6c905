"""Every family's products of several requests, made together: the logits stay, up to rounding."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from checkpoint import family as families
from checkpoint import linear_batch
from checkpoint.coroutine import Coroutine
from checkpoint.linear_batch import LinearCall, batch_linear
from support.nodes.passes_together import run_together

PROMPTS = [[5, 17, 3, 88, 41, 9, 9, 60, 2, 71, 33, 12], [70, 2, 35, 35, 80], [14, 6, 91, 57, 23, 44, 8]]
NEXT = [[31, 4, 77], [62, 90, 11], [28, 50]]
"""The last request arrives a step later: its prompt meets the others' first decoding passes."""


def passes(model: Any) -> list[list[Callable[[], torch.Tensor]]]:
    """Of each request, its passes in order. Each returns the last row's logits."""

    def request(prompt: list[int], following: list[int]) -> list[Callable[[], torch.Tensor]]:
        cache = families.new_cache(model.config)

        def read(tokens: list[int]) -> torch.Tensor:
            out = model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits: torch.Tensor = out.logits[0, -1]
            return logits

        return [lambda tokens=tokens: read(tokens) for tokens in [prompt, *([token] for token in following)]]

    return [request(prompt, following) for prompt, following in zip(PROMPTS, NEXT, strict=True)]


def test_logits_are_those_of_each_request_alone(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, used = copy.deepcopy(tiny.model), Counter[int]()
    hooks = [
        module.register_forward_hook(lambda module, *_: used.update([id(module)]))
        for module in model.modules()
        if type(module) is torch.nn.Linear
    ]
    with torch.inference_mode():
        alone = [[one() for one in request] for request in passes(model)]
    for hook in hooks:
        hook.remove()
    batch_linear(model)
    met, original = Counter[int](), linear_batch.multiply
    products = 0

    def counted(calls: list[LinearCall], exact: bool) -> list[torch.Tensor]:
        nonlocal products
        products += 1
        met[id(calls[0].module)] += len(calls)
        return original(calls, exact)

    monkeypatch.setattr(linear_batch, "multiply", counted)
    first, second, third = passes(model)
    steps = [[first[0], second[0]], *([first[n], second[n], third[n - 1]] for n in (1, 2, 3))]
    with torch.inference_mode():
        together = [run_together([Coroutine(one) for one in step]) for step in steps]
    for number, request in enumerate(alone):
        for at, expected in enumerate(request):
            torch.testing.assert_close(together[at + (number == 2)][number], expected, rtol=1e-3, atol=1e-3)
    assert met == used, "every product of a linear layer, and no other"
    assert used[id(model.lm_head)] == 11
    assert products < met.total() * 0.4, "11 passes in 4 steps: each pass meets the others at each layer"


def test_exact_products_keep_every_bit(tiny: Any) -> None:
    """Decoding, in bfloat16, where requests share products on CPUs that have the kernels for it."""
    model = copy.deepcopy(tiny.model).to(torch.bfloat16)
    with torch.inference_mode():
        try:
            alone = [[one() for one in request] for request in passes(model)]
        except RuntimeError as error:
            pytest.skip(f"Transformers' own model does not run in bfloat16: {error}")
        batch_linear(model)
        steps = zip(*(request[:3] for request in passes(model)), strict=True)
        together = [run_together([Coroutine(one) for one in step], exact=True) for step in steps]
    for at, step in enumerate(together):
        assert all(torch.equal(got, request[at]) for got, request in zip(step, alone, strict=True))
