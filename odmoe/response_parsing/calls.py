"""What readers of tool calls give."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class CallPiece(NamedTuple):
    """Of a tool call."""

    name: str | None
    """With it a call begins."""
    arguments: str
    """What it adds to the call's arguments, which are JSON."""
    call_id: str | None = None
    """The model's own, if it writes one."""


class CallReader(Protocol):
    """Reads what stands between the markers of one or more calls."""

    @property
    def is_whole(self) -> bool:
        """There is a call, and none is cut or broken."""

    @property
    def is_broken(self) -> bool:
        """This is no call, or none any more: nothing further is read."""

    def push(self, text: str) -> list[CallPiece]:
        """What the next part of the text completes."""

    def end(self, closed: bool) -> list[CallPiece]:
        """What the end of the text completes. `closed`: the model has ended it; else it was cut."""
