"""Answers of an observed model: their rows and routes, alone and together, and where they end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from odmoe.commands.shared.whole_model import load_whole
from odmoe.text import load_tokenizer
from odmoe.training.observed_model import ObservedModel
from support.models.checkpoints import build


@pytest.mark.slow
def test_answers_together_are_those_of_each_alone(demo: Path) -> None:
    """Prompts of three lengths, so that two are padded; one answer ends early, by a token of its own."""
    observed = ObservedModel(load_whole(demo, "float32"))
    prompts = [load_tokenizer(demo)(text)["input_ids"] for text in ("HAMLET\nTo be", "Question: 1 + 1?\nAnswer:", "So")]
    feeds = []
    handle = observed.model.register_forward_pre_hook(
        lambda _model, _args, given: feeds.append(int(given["input_ids"][0, -1])), with_kwargs=True
    )
    list(observed.answer(prompts[0], 8))
    handle.remove()
    observed.model.generation_config.eos_token_id = end = feeds[4]
    alone = [list(observed.answer(prompt, 8)) for prompt in prompts]
    together = observed.answers(prompts, 8, lambda _number: None)
    assert len(alone[0]) == feeds[1:].index(end) + 1 < 9, "the first answer ends before the others"
    for passes, rows in zip(alone, together, strict=True):
        assert rows.prompt == passes[0].tokens
        for layer in observed.shape.layers:
            inputs, scores = (torch.cat([getattr(one, name)[layer] for one in passes]) for name in ("inputs", "scores"))
            torch.testing.assert_close(rows.inputs[layer], inputs, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(rows.scores[layer], scores, rtol=1e-4, atol=1e-4)
            chosen = torch.cat([one.index[layer] for one in passes])
            assert rows.index[layer].sort().values.tolist() == chosen.sort().values.tolist()


@pytest.mark.parametrize(("end", "passes"), [(0, 1), ([7, 0], 1), (7, 6), ([7, 8], 6), (None, 6)])
def test_an_end_of_sequence_token_ends_the_answer(end: Any, passes: int) -> None:
    """Every answer is token 0, again and again: all logits are equal."""
    model = build("mixtral").eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    model.generation_config.eos_token_id = end
    found = list(ObservedModel(model).answer([5, 6, 7], 5))
    assert [one.tokens for one in found] == [3, 1, 1, 1, 1, 1][:passes]
    rows = ObservedModel(model).answers([[5, 6, 7], [6]], 5, lambda _number: None)
    assert [(one.prompt, len(one.inputs[0])) for one in rows] == [(3, 2 + passes), (1, passes)]
