"""Where the drafts of one request come from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from wire.messages import Draft


class Drafter:
    """What a source does not need does nothing here."""

    nbytes = 0
    """Of KV caches and the like, on the main model's device."""

    def offer(self, draft: Draft) -> None:
        """The shadow has drafted a token."""

    def on_read(self, position: int, states: Sequence[torch.Tensor], gained: tuple[int, ...]) -> None:
        """A pass from `position` on has given tokens. `states`: the model's last hidden states of what it has read,
        [1, T, H] together, without those after a wrong draft. On the model's thread, in inference mode."""

    def on_wanted(self, count: int) -> None:
        """So many drafts are wanted after the next pass."""

    def on_decoded(self, tokens: Sequence[int]) -> bool | None:
        """The answer goes on with these tokens. Whether the last of them had been drafted rightly; None: it had not
        been drafted."""
        raise NotImplementedError

    def following(self, most: int) -> tuple[int, ...]:
        """Drafts of the tokens after the last one."""
        raise NotImplementedError
