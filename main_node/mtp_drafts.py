"""Drafts of one request by the model's own multi-token-prediction head."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from checkpoint import kv
from checkpoint.mtp_head import MtpHead
from main_node.drafter import Drafter


class MtpDrafts(Drafter):
    """The head reads what the model has read, a token later, into a KV cache of its own. For a draft after the first it
    reads its own state and the draft before; these rows are cut off again.

    A prompt's tokens that were kept from an earlier one have no states: the head begins behind them.
    """

    def __init__(self, head: MtpHead, prompt: Sequence[int], wanted: int) -> None:
        self._wanted = wanted
        """Drafts after the next pass. While there are none, states wait for the head."""
        self._head = head
        self._tokens = list(prompt)
        self._cache = head.new_cache()
        self._first = self._count = 0
        """Position of the cache's first row, and its rows."""
        self._waiting: list[torch.Tensor] = []
        """States [1, T, H] of the positions after the cache's."""
        self._drafts: tuple[int, ...] = ()
        self._right: bool | None = None

    def on_read(self, position: int, states: Sequence[torch.Tensor], gained: tuple[int, ...]) -> None:
        self._tokens += gained
        self._right = _last_is_right(self._drafts, gained)
        if position != self._first + self._count + sum(some.shape[1] for some in self._waiting):
            self._cache, self._first, self._count, self._waiting = self._head.new_cache(), position, 0, []
        self._waiting += states
        self._drafts = self._made() if self._wanted and gained else ()

    def _made(self) -> tuple[int, ...]:
        head, states = self._head, torch.cat(self._waiting, dim=1)
        at, self._waiting = self._first + self._count, []
        state = head.read(states, self._tokens[at + 1 : at + 1 + states.shape[1]], at, self._cache)[:, -1:]
        self._count += states.shape[1]
        found = [head.choose(state)]
        while len(found) < self._wanted:
            state = head.read(state, found[-1:], len(self._tokens) - 2 + len(found), self._cache)
            found.append(head.choose(state))
        if len(found) > 1:
            self._cache.crop(1 - len(found))
        return tuple(found)

    def on_wanted(self, count: int) -> None:
        self._wanted = count

    def on_decoded(self, tokens: Sequence[int]) -> bool | None:
        return self._right

    def following(self, most: int) -> tuple[int, ...]:
        return self._drafts[:most]

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Of the cache, and of states that wait."""
        return kv.cache_bytes(self._cache) + sum(some.nbytes for some in self._waiting)


def _last_is_right(drafts: tuple[int, ...], tokens: tuple[int, ...]) -> bool | None:
    """Of the tokens that a pass gave; None where the last of them was not drafted after the others."""
    if not tokens or len(drafts) < len(tokens) or drafts[: len(tokens) - 1] != tokens[:-1]:
        return None
    return drafts[len(tokens) - 1] == tokens[-1]
