"""One request on the main node: its tokens, its KV cache, and both as the shadow is told of them."""

from __future__ import annotations

from typing import Any

import torch

from checkpoint.tensors import tensor_bytes
from scheduler import types as t
from wire import messages as w

ALIGN_PART_BYTES = 1 << 20
"""KV rows travel in parts of about this size: large messages are slow to encode and would hold up what follows."""


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


def align_messages(command: t.Align, token: int | None, rows: list[torch.Tensor]) -> list[w.Message]:
    """An alignment as one message, or several where it has many KV rows."""
    if command.kv_start == command.kv_stop:
        return [w.Align(command.request, command.step, token, command.kv_start, ())]
    count = command.kv_stop - command.kv_start
    row_bytes = sum(r.nbytes for r in rows) // count
    each = max(1, ALIGN_PART_BYTES // max(row_bytes, 1))
    messages: list[w.Message] = []
    for start in range(0, count, each):
        stop = min(start + each, count)
        part = tuple(w.Tensor(*tensor_bytes(r[:, :, start:stop])) for r in rows)
        messages.append(w.Align(command.request, command.step, token, command.kv_start + start, part, stop < count))
    return messages
