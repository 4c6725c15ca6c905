"""Answers of an observed model: their greedy tokens, and where they end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from odmoe.training.observed_model import ObservedModel
from support.models.checkpoints import build


@pytest.mark.parametrize(("end", "passes"), [(0, 1), ([7, 0], 1), (7, 6), ([7, 8], 6), (None, 6)])
def test_an_end_of_sequence_token_ends_the_answer(end: Any, passes: int) -> None:
    """Every answer is token 0, again and again: all logits are equal."""
    model = build("mixtral").eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    model.generation_config.eos_token_id = end
    found = list(ObservedModel(model).answer([5, 6, 7], 5))
    assert [one.tokens for one in found] == [3, 1, 1, 1, 1, 1][:passes]
