"""Perplexity beside Transformers' own loss, divergence beside torch's."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from odmoe.quality.passages import divergence, losses, perplexity, windows


@pytest.mark.parametrize("count", [2, 3, 9, 10, 11, 19, 100])
@pytest.mark.parametrize("length", [2, 3, 10])
def test_windows_ask_about_each_token_but_the_first_once(count: int, length: int) -> None:
    ids = list(range(count))
    found = windows(ids, length)
    assert [token for window in found for token in window[1:]] == ids[1:]
    assert all(2 <= len(window) <= length for window in found)


def test_perplexity_is_that_of_transformers_own_loss(demo: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32, experts_implementation="eager").eval()
    text = torch.randint(2048, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    nats, expected = [], []
    for window in windows(text, 24):
        ids = torch.tensor([window])
        with torch.inference_mode():
            out = model(input_ids=ids, labels=ids)
        expected += [float(out.loss)] * (len(window) - 1)
        nats += losses(out.logits[0], window)
    assert len(nats) == 59
    assert math.log(perplexity(nats)) == pytest.approx(sum(expected) / 59, rel=1e-6)


def test_divergence_is_that_of_torch() -> None:
    p, q = torch.randn(2, 5, 30, generator=torch.Generator().manual_seed(0)).double()
    expected = torch.nn.functional.kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="none")
    assert torch.allclose(divergence(p, q), expected.sum(-1))
