"""Prompts read in chunks: each family's own model goes on from its cache, or the prompt is read whole."""

from __future__ import annotations

from typing import Any

import torch

from checkpoint import family as families
from checkpoint import kv

PROMPT = [5, 17, 3, 88, 41, 9, 9, 60, 2, 71, 33, 12, 7, 45, 21, 90, 14, 62, 38, 11, 50]
HALVES = (11, 10)
FOLLOWING = (3, 10, 17)
STARTS_AGAIN = {"jamba", "minimax"}
"""Their recurrences begin every pass of several tokens from nothing."""


def logits(model: Any, cuts: tuple[int, ...]) -> torch.Tensor:
    """Of the prompt's last token, and of some tokens after it: [4, V]."""
    cache, at, rows = families.new_cache(model.config), 0, []
    with torch.inference_mode():
        for count in cuts:
            ids = torch.tensor([PROMPT[at : at + count]])
            out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            at += count
        rows.append(out.logits[0, -1])
        for token in FOLLOWING:
            out = model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            rows.append(out.logits[0, -1])
    return torch.stack(rows)


def test_chunks_give_the_logits_of_the_whole_or_are_not_read(family: str, tiny: Any) -> None:
    whole = logits(tiny.model, (len(PROMPT),))
    if family in STARTS_AGAIN:
        assert (whole - logits(tiny.model, HALVES)).abs().max() > 0.1 * whole.abs().max()
        assert not kv.continues(tiny.model.config)
    if not kv.continues(tiny.model.config):
        return
    for cuts in (HALVES, (4, 4, 4, 4, 5), (16, 5), (20, 1)):
        torch.testing.assert_close(logits(tiny.model, cuts), whole, rtol=1e-3, atol=2e-3, msg=str(cuts))
