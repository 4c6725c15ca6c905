"""Drafts of one request by the model's own multi-token-prediction head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from checkpoint import kv
from checkpoint.mtp_head import MtpHead
from main_node.drafter import Drafter

_WAITING = 16
"""Rows that wait at most while no drafts are wanted, so that drafts wanted again do not begin with a long step."""


class MtpDrafts(Drafter):
    """The head reads what the model has read, a token later, into a KV cache of its own. For a draft after the first it
    reads its own state and the draft before; these rows are cut off again.

    A prompt's tokens that were kept from an earlier one have no states: the head begins behind them.
    """

    def __init__(
        self, head: MtpHead, prompt: Sequence[int], room: int, wanted: int, check_wanted: Callable[[], None]
    ) -> None:
        """`room`: the most tokens of the answer. `check_wanted`: called now and then, raises where nobody wants it."""
        self._wanted = wanted
        """Drafts after the next pass."""
        self._head, self._check_wanted = head, check_wanted
        self._tokens = list(prompt)
        self._end = len(prompt) + room
        self._cache = head.new_cache()
        self._first = self._count = 0
        """Position of the cache's first row, and its rows."""
        self._waiting: list[torch.Tensor] = []
        """States [1, T, H] of the positions after the cache's, `_WAITING` at most."""
        self._drafts: tuple[int, ...] = ()
        self._right: bool | None = None

    def on_read(self, position: int, states: Sequence[torch.Tensor], gained: tuple[int, ...]) -> None:
        self._tokens += gained
        self._right = _last_is_right(self._drafts, gained)
        self._drafts = ()
        if position != self._first + self._count + _rows(self._waiting):
            self._cache, self._first, self._count, self._waiting = self._head.new_cache(), position, 0, []
        self._waiting += states
        most = min(self._wanted, self._end - len(self._tokens) - 1) if gained else 0
        if most > 0 or _rows(self._waiting) > _WAITING:
            state = self._read()
            self._drafts = self._made(state, most) if most > 0 else ()

    def _read(self) -> torch.Tensor:
        """The head reads what waits. Its last state, [1, 1, H]."""
        states, at = torch.cat(self._waiting, dim=1), self._first + self._count
        following = self._tokens[at + 1 : at + 1 + states.shape[1]]
        state = self._head.read(states, following, at, self._cache, self._check_wanted)
        self._waiting, self._count = [], self._count + states.shape[1]
        return state

    def _made(self, state: torch.Tensor, count: int) -> tuple[int, ...]:
        """`count` drafts after the last token."""
        head = self._head
        found = [head.choose(state)]
        while len(found) < count:
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


def _rows(states: Sequence[torch.Tensor]) -> int:
    return sum(some.shape[1] for some in states)


def _last_is_right(drafts: tuple[int, ...], tokens: tuple[int, ...]) -> bool | None:
    """Of the tokens that a pass gave; None where the last of them was not drafted after the others."""
    if not tokens or len(drafts) < len(tokens) or drafts[: len(tokens) - 1] != tokens[:-1]:
        return None
    return drafts[len(tokens) - 1] == tokens[-1]
