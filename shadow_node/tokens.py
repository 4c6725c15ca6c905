"""The tokens that one request's decode passes read, and the drafts that follow from them."""

from __future__ import annotations

from typing import Any

from scheduler.drafts.path import START, extend
from wire.messages import Draft


class Tokens:
    """Decode pass -> token: the main model's where it was told, else the shadow's own.

    `answer`: the tokens before the first pass that is followed.
    """

    def __init__(self, request: int, answer: list[int]) -> None:
        self.drafting = False
        """The main model has asked for drafts. From then on it is told each."""
        self._request = request
        self._read: dict[int, int] = {}
        """What a pass has read, or the shadow's own for it."""
        self._told: dict[int, int] = {}
        """The main model's."""
        self._paths = {len(answer): extend(START, answer)}
        """Of the answer before a pass."""
        self._drafts: dict[int, Draft] = {}
        """Of each pass the last one that was made."""
        self._unsaid: dict[int, Draft] = {}

    def on_told(self, step: int, token: int) -> None:
        """The main model's token of a pass has come."""
        self._told[step] = token

    def differ(self, step: int, token: int) -> bool:
        """Whether a pass that has begun has read another token."""
        return self._read.get(step) != token

    def first(self, step: int, token: int) -> None:
        """The prompt was read; `token` is the shadow's own for pass `step`."""
        self._read[step] = token

    def read(self, step: int) -> int:
        """Pass `step` begins. Returns its token."""
        token = self._read[step] = self._told[step] if step in self._told else self._read[step]
        self._paths[step + 1] = extend(self._paths[step], [token])
        return token

    def on_pass_ended(self, step: int, token: int) -> None:
        """Pass `step` has ended with `token`, the shadow's own for the next pass."""
        after = step + 1
        self._read[after] = token
        draft = Draft(self._request, after, token, self._paths[after])
        if self._drafts.get(after) == draft:
            return
        for replaced in [one for one in self._drafts if one > after]:
            del self._drafts[replaced]
            self._unsaid.pop(replaced, None)
        self._drafts[after] = self._unsaid[after] = draft

    def take_drafts(self) -> list[Draft]:
        """Those that are to be told now, in order."""
        if not self.drafting:
            return []
        drafts = list(self._unsaid.values())
        self._unsaid.clear()
        return drafts

    def forget(self, step: int) -> None:
        """No way leads back before pass `step`."""
        _drop_before(step, self._read)
        _drop_before(step, self._told)
        _drop_before(step, self._paths)
        _drop_before(step, self._drafts)
        if not self.drafting:
            _drop_before(step, self._unsaid)


def _drop_before(step: int, by_pass: dict[int, Any]) -> None:
    for past in [one for one in by_pass if one < step]:
        del by_pass[past]
