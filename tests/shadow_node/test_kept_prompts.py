"""A shadow that keeps its KV caches of earlier prompts predicts what one predicts that reads each prompt anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from shadow_node.model import ShadowModel
from shadow_node.node import Shadow
from shadow_node.prompt_reading import BLOCK
from support.shadows.shadow_client import STEPS, MainAnswer, ShadowClient
from wire.messages import CloseRequest

TURNS = (BLOCK + 9, 2 * BLOCK, 2 * BLOCK + 1, 2 * BLOCK + 40)
"""Tokens of each prompt of a conversation. The last token is always read, so that no block ends with it."""
FOUND = (0, BLOCK, BLOCK, 2 * BLOCK)
_DRAWN = torch.Generator().manual_seed(3)
TOKENS = torch.randint(3, 250, (max(TURNS) + STEPS,), generator=_DRAWN).tolist()


@pytest.fixture
def keeping(shadow_model: Callable[[str], ShadowModel]) -> Iterator[Callable[[int], ShadowClient]]:
    made: list[Shadow] = []

    def build(most_bytes: int) -> ShadowClient:
        model = shadow_model("int8")
        made.append(Shadow("shadow", model, "abc", "float32", kept=model.kept_prompts(most_bytes)))
        main = ShadowClient(made[-1])
        main.hello()
        return main

    yield build
    for shadow in made:
        shadow.close()


def predicted(main: ShadowClient, number: int, tokens: int) -> list[Any]:
    """Of every pass of an answer that only its tokens are told of, and where the shadow found its prompt."""
    kept = main.shadow.kept
    assert kept is not None
    before = kept.tokens_found
    main.open(number, MainAnswer(tuple(TOKENS[:tokens]), TOKENS[tokens : tokens + STEPS], []), kv=0)
    for step in range(STEPS - 1):
        main.align(number, step)
        main.settle()
    main.channel.send(CloseRequest(number))
    return [kept.tokens_found - before, *(main.routes(number, step) for step in range(STEPS - 1))]


@pytest.mark.slow
def test_predictions_of_a_warm_prompt_are_those_of_a_cold_one(keeping: Callable[[int], ShadowClient]) -> None:
    warm = keeping(1 << 30)
    for number, (tokens, found) in enumerate(zip(TURNS, FOUND, strict=True), 1):
        cold = predicted(keeping(1 << 30), 1, tokens)
        assert cold[0] == 0
        assert all(len(routes) == 8 for routes in cold[1:])
        assert predicted(warm, number, tokens) == [found, *cold[1:]]


@pytest.mark.slow
def test_what_is_kept_is_bounded_and_counts_as_memory(keeping: Callable[[int], ShadowClient]) -> None:
    whole = keeping(1 << 30)
    predicted(whole, 1, TURNS[-1])
    assert whole.shadow.kept is not None
    each = whole.shadow.kept.store.nbytes // 2
    assert whole.shadow.cache_bytes_max > 2 * each
    main = keeping(each)
    predicted(main, 1, TURNS[-1])
    assert main.shadow.kept is not None
    assert (len(main.shadow.kept.store), main.shadow.kept.store.nbytes) == (1, each)
    assert predicted(main, 2, TURNS[-1])[0] == BLOCK


def test_nothing_is_kept_unless_asked_for(shadow_model: Callable[[str], ShadowModel]) -> None:
    assert shadow_model("int8").kept_prompts(0) is None
