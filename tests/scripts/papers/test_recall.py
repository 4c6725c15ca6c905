"""Equations (2) and (3) as the paper writes them, and prompts of exact length."""

from __future__ import annotations

import random

import pytest
from transformers import AutoTokenizer

from scripts.lib.prompts import prompts_of_length
from scripts.papers import recall
from support.paths import ROOT


def test_an_answer_that_has_ended_does_not_count_any_more() -> None:
    """Against both sums with the paper's indicator, written out: L layers of top-k experts, c of them right."""
    draw = random.Random(5)
    layers, top_k, longest = 4, 2, 9
    right = [[draw.randint(0, layers * top_k) for _ in range(length)] for length in (9, 3, 1, 7)]
    curves = [[c / (layers * top_k) for c in one] for one in right]
    for n in range(longest):
        exists = [1 if n < len(one) else 0 for one in right]
        correct = sum(one[n] if there else 0 for one, there in zip(right, exists, strict=True))
        assert recall.by_token(curves)[n] == pytest.approx(correct / (layers * top_k * sum(exists)))
    activated = layers * top_k * sum(map(len, right))
    assert recall.overall(curves) == pytest.approx(sum(map(sum, right)) / activated)
    assert len(recall.by_token(curves)) == longest


@pytest.mark.parametrize("tokens", [16, 128, 512])
def test_prompts_have_the_length_that_was_asked_for_as_text_too(tokens: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "deep-moe")
    found = prompts_of_length(tokenizer, 24, tokens, seed=1)
    assert len({tuple(prompt) for prompt in found}) == 24
    for prompt in found:
        assert tokenizer(tokenizer.decode(prompt, skip_special_tokens=True))["input_ids"] == prompt
        assert len(prompt) == tokens
    assert found == prompts_of_length(tokenizer, 24, tokens, seed=1)
    assert found != prompts_of_length(tokenizer, 24, tokens, seed=2)
