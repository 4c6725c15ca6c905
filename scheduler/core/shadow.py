"""What the shadow is to do: which requests to follow, and when to align (OD-MoE section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler import types as t
from scheduler.alignment import NEWEST_ROWS, Alignment
from scheduler.core.commands import Commands


@dataclass(slots=True)
class _Followed:
    prompt_tokens: int
    decoded: int = 0
    """Tokens of the answer so far."""
    kv_aligned: int = 0
    """The shadow has the main model's KV rows up to this position."""
    aligned: int = -1
    """The last decode pass that it was told of."""
    drafts: int = 0
    """See `TokenDecoded`."""


class ShadowFollower:
    """Commands for the shadow; none while there is no shadow. One that joins late follows every open request."""

    def __init__(self, commands: Commands, alignment: Alignment) -> None:
        self.alignment = alignment
        self.present = False
        self._commands = commands
        self._requests: dict[int, _Followed] = {}

    def on_joined(self) -> None:
        self.present = True
        for number, followed in self._requests.items():
            step = max(followed.decoded - 1, 0)
            self._follow(number, step)
            if followed.decoded:
                self._align(number, step)

    def _follow(self, request: int, step: int) -> None:
        """It reads all tokens before decode pass `step`, whatever it has read of the request before."""
        followed = self._requests[request]
        followed.kv_aligned, followed.aligned = 0, step - 1
        self._commands.follow(request, step)

    def on_lost(self) -> None:
        self.present = False

    def on_request_opened(self, request: int, prompt_tokens: int) -> None:
        self._requests[request] = _Followed(prompt_tokens)
        if self.present:
            self._commands.follow(request, 0)

    def on_request_closed(self, request: int) -> None:
        del self._requests[request]
        if self.present:
            self._commands.unfollow(request)

    def on_token_decoded(self, request: int, index: int, drafts: int = 0, again: bool = False) -> None:
        """Token `index` exists: decode pass `index` of the shadow may start. `again`: the main model has just read all
        tokens before it again, and so does the shadow."""
        followed = self._requests[request]
        followed.decoded, followed.drafts = index + 1, drafts
        if self.present:
            if again:
                self._follow(request, index)
            self._align(request, index)

    def _align(self, request: int, step: int) -> None:
        """Where KV rows are due: all that the shadow has not had, up to that pass, or (`newest`) those that were
        computed since the last command. A block is aligned once: what was due at any of its passes is due after it,
        and a token of all of them."""
        followed = self._requests[request]
        passes = range(followed.aligned + 1, step + 1)
        followed.aligned = step
        start = stop = followed.prompt_tokens + step
        if any(map(self.alignment.kv_due, passes)):
            newest = step > 0 and self.alignment.kv_rows == NEWEST_ROWS
            start, followed.kv_aligned = stop - len(passes) if newest else followed.kv_aligned, stop
        token = any(map(self.alignment.token_due, passes))
        before = len(passes) - 1 if token else 0
        self._commands.align(t.Align(request, step, token, start, stop, followed.drafts, before))
