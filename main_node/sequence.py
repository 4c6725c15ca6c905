"""One request on the main node: its tokens and its KV cache."""

from __future__ import annotations

from typing import Any

import torch


class Sequence:
    """Tokens in, tokens out, and the cache that the passes have filled so far."""

    def __init__(self, prompt: list[int], max_new_tokens: int, cache: Any) -> None:
        self.prompt = prompt
        self.max_new_tokens = max_new_tokens
        self.cache = cache
        self.tokens: list[int] = []

    def prompt_before(self, step: int) -> tuple[int, ...]:
        return (*self.prompt, *self.tokens[:step])

    def token_of(self, step: int) -> int:
        return self.tokens[step]

    def kv_rows(self, start: int, stop: int) -> list[torch.Tensor]:
        """[key, value] of every cache layer in turn, each [1, heads, stop - start, D]; empty where start == stop."""
        if start == stop:
            return []
        rows = []
        for layer in self.cache.layers:
            rows += [layer.keys[:, :, start:stop], layer.values[:, :, start:stop]]
        return rows

    def cache_bytes(self) -> int:
        return sum(t.nbytes for layer in self.cache.layers if layer.is_initialized for t in (layer.keys, layer.values))
