"""One request on the main node: its tokens, its KV cache, and the messages that carry both to the shadow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from checkpoint import kv
from checkpoint.tensors import tensor_bytes
from scheduler import types as t
from scheduler.alignment import LATE, Alignment
from wire import messages as w

ALIGN_PART_BYTES = 1 << 20
"""KV rows travel in parts of about this size: large messages are slow to encode and would delay the next ones."""


class Sequence:
    """A request's tokens, and the cache that its passes have filled so far."""

    def __init__(self, prompt: list[int], max_new_tokens: int, cache: Any) -> None:
        self.prompt = prompt
        self.max_new_tokens = max_new_tokens
        self.cache = cache
        self.tokens: list[int] = []
        self._resting = True

    def prompt_before(self, step: int) -> tuple[int, ...]:
        """All tokens before decode pass `step`'s."""
        return (*self.prompt, *self.tokens[:step])

    def token_of(self, step: int) -> int:
        """The token that decode pass `step` reads."""
        return self.tokens[step]

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Around a pass, entered before the scheduler knows of it: meanwhile the cache's states are half written."""
        self._resting = False
        try:
            yield
        finally:
            self._resting = True

    def kv_rows(self, start: int, stop: int) -> kv.CachePiece:
        """The cache's rows of positions [start, stop), and its states. No rows if start == stop."""
        return kv.take(self.cache, start, stop, self._resting)

    def free(self) -> None:
        """No pass follows: give up the cache."""
        self.cache = None

    def cache_bytes(self) -> int:
        return kv.cache_bytes(self.cache)


def shadow_messages(
    command: t.Follow | t.Align | t.Unfollow, data: Sequence | None, policy: Alignment, lookahead: int, departure: str
) -> list[w.Message]:
    """The messages of a command. `data`: None for a request that the shadow need not follow any more."""
    if isinstance(command, t.Unfollow) or data is None:
        return [w.CloseRequest(command.request)]
    if isinstance(command, t.Follow):
        prompt, periods = data.prompt_before(command.step), (policy.token_period, policy.kv_period)
        late = departure == LATE
        return [w.OpenRequest(command.request, prompt, command.step, data.max_new_tokens, *periods, lookahead, late)]
    token = data.token_of(command.step) if command.token else None
    return align_messages(command, token, data.kv_rows(command.kv_start, command.kv_stop))


def align_messages(command: t.Align, token: int | None, rows: kv.CachePiece) -> list[w.Message]:
    """An alignment as one message, or several where there are many KV rows."""
    parts = list(rows.parts(ALIGN_PART_BYTES)) or [(command.kv_stop, [])]
    messages: list[w.Message] = []
    for number, (at, tensors) in enumerate(parts, 1):
        kv_parts = tuple(w.Tensor(*tensor_bytes(tensor)) for tensor in tensors)
        messages.append(w.Align(command.request, command.step, token, at, kv_parts, more=number < len(parts)))
    return messages
