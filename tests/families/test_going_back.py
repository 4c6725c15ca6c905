"""Caches of every kind go back to a mark: what follows is, to the last bit, what follows without the way there."""

from __future__ import annotations

from typing import Any

import torch

from checkpoint import family as families
from checkpoint import kv

TOKENS, OTHERS = [31, 4, 77, 15, 8], [62, 90, 11]


def read(model: Any, cache: Any, *tokens: int) -> torch.Tensor:
    """One pass; the last token's logits."""
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True)
    return out.logits[0, -1]


def contents(cache: Any, stop: int) -> list[torch.Tensor]:
    piece = kv.take(cache, 0, stop)
    return [row.tensor for row in piece.rows] + piece.states


def test_after_the_way_back_every_pass_is_as_without_it(tiny: Any) -> None:
    straight, detour = families.new_cache(tiny.model.config), families.new_cache(tiny.model.config)
    for cache in (straight, detour):
        read(tiny.model, cache, *tiny.prompt)
    read(tiny.model, straight, TOKENS[0])
    read(tiny.model, detour, TOKENS[0])
    end = len(tiny.prompt) + 1
    for passes in (1, 3):
        mark = kv.mark(detour)
        for other in OTHERS[:passes]:
            read(tiny.model, detour, other)
        kv.go_to(detour, mark)
        for a, b in zip(contents(straight, end), contents(detour, end), strict=True):
            assert torch.equal(a, b)
    for token in TOKENS[1:]:
        assert torch.equal(read(tiny.model, straight, token), read(tiny.model, detour, token))
    for a, b in zip(contents(straight, end + 4), contents(detour, end + 4), strict=True):
        assert torch.equal(a, b)


def test_back_and_forward_again(tiny: Any) -> None:
    """A repetition that is given up leaves what it repeated."""
    cache, straight = families.new_cache(tiny.model.config), families.new_cache(tiny.model.config)
    for one in (cache, straight):
        read(tiny.model, one, *tiny.prompt)
    before = kv.mark(cache)
    for one in (cache, straight):
        read(tiny.model, one, TOKENS[0])
    done = kv.mark(cache, rows=True)
    kv.go_to(cache, before)
    read(tiny.model, cache, OTHERS[0])
    kv.go_to(cache, done)
    for token in TOKENS[1:]:
        assert torch.equal(read(tiny.model, straight, token), read(tiny.model, cache, token))
