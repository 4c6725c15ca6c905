"""What the shadow is told: which requests to follow, and when to align (OD-MoE section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.alignment import Alignment
from scheduler.types import Align, Command, Follow, Unfollow


@dataclass(slots=True)
class _Followed:
    """`decoded`: tokens of the answer so far. `kv_aligned`: the shadow has the main model's KV rows up to here."""

    prompt_tokens: int
    decoded: int = 0
    kv_aligned: int = 0


class ShadowFollower:
    """Commands for the shadow, none while there is none. One that joins late takes up every open request."""

    def __init__(self, alignment: Alignment) -> None:
        self.alignment = alignment
        self.present = False
        self._requests: dict[int, _Followed] = {}

    def joined(self) -> list[Command]:
        self.present = True
        commands: list[Command] = []
        for number, followed in self._requests.items():
            followed.kv_aligned = 0
            step = max(followed.decoded - 1, 0)
            commands.append(Follow(number, step))
            if followed.decoded:
                commands.append(self._align(number, step))
        return commands

    def lost(self) -> None:
        self.present = False

    def opened(self, request: int, prompt_tokens: int) -> list[Command]:
        self._requests[request] = _Followed(prompt_tokens)
        return [Follow(request, 0)] if self.present else []

    def closed(self, request: int) -> list[Command]:
        del self._requests[request]
        return [Unfollow(request)] if self.present else []

    def decoded(self, request: int, index: int) -> list[Command]:
        """Token `index` exists: decode pass `index` of the shadow may start."""
        self._requests[request].decoded = index + 1
        return [self._align(request, index)] if self.present else []

    def _align(self, request: int, step: int) -> Align:
        """KV rows, where due: all that the shadow has not had, up to that pass."""
        followed = self._requests[request]
        start = stop = followed.prompt_tokens + step
        if self.alignment.kv_due(step):
            start, followed.kv_aligned = followed.kv_aligned, stop
        return Align(request, step, self.alignment.token_due(step), start, stop)
