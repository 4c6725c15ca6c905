"""Log-probabilities of a prompt's tokens are those of all logits of the family's own model, whatever it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checkpoint import family as families
from main_node.choosing import prompt_scores
from main_node.choosing.prompt_scores import OutputLayer, PromptScores

TOP = 4


def test_those_of_the_whole_models_logits(family: str, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny.model, torch.tensor([tiny.prompt])
    monkeypatch.setattr(prompt_scores, "LOGITS_BYTES", 5 * 4 * model.get_input_embeddings().num_embeddings)
    scores = PromptScores(tiny.prompt, TOP)
    output = OutputLayer(model, lambda: scores)
    assert output.rows == 5
    with torch.inference_mode():
        cache = families.new_cache(model.config)
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        scores.read(output, lambda: None)
        wanted = model(input_ids=ids, past_key_values=families.new_cache(model.config)).logits[0].float()
    model.base_model._forward_hooks.clear()  # the model is the session's
    assert wanted.shape[0] == len(tiny.prompt)
    every = wanted.log_softmax(-1)
    assert scores.found[0] is None
    for place, one in enumerate(scores.found[1:]):
        assert one is not None
        assert one.token_id == tiny.prompt[place + 1]
        assert one.logprob == pytest.approx(float(every[place, one.token_id]), abs=1e-4)
        best = every[place].topk(TOP).values.tolist()
        assert [value for _, value in one.top] == pytest.approx(best, abs=1e-4)
        assert [float(every[place, token]) for token, _ in one.top] == pytest.approx(best, abs=1e-4)
    assert not scores.unscored_tokens
