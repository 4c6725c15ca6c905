"""The drafts of simulated requests, as the main node keeps them. Tokens are known only as right or wrong."""

from __future__ import annotations

from scheduler.drafts.length import DraftLengths, Planned
from scheduler.drafts.table import DraftTable

RIGHT, WRONG = 0, 1
"""Tokens: the main model's own, and any other."""


class RequestDrafts:
    """Those of one request. `lengths`: of all requests."""

    def __init__(self, lengths: DraftLengths) -> None:
        self.blocks = self.rows = self.gained = 0
        """Passes that decode, their rows, and the tokens that they gave."""
        self.foretold: bool | None = None
        """Of the last token, see `TokenDecoded`."""
        self._table = DraftTable()
        self._length = lengths.make_length()

    def offer(self, step: int, token: int, path: int) -> None:
        """A draft has come, see `DraftTable.offer`."""
        self._table.offer(step, token, path)

    def block(self, most: int) -> tuple[int, int]:
        """Rows of the next pass, at most `most`, and how many of the drafts in it are right, up to the first wrong
        one."""
        drafts = self._table.following()
        rows = self._length.rows(len(drafts), most)
        verified = drafts[: rows - 1]
        return rows, verified.index(WRONG) if WRONG in verified else rows - 1

    def read(self, rows: int, gained: int) -> None:
        """A pass over a token and its drafts has ended."""
        self.blocks, self.rows, self.gained = self.blocks + 1, self.rows + rows, self.gained + gained
        self.foretold = right = self._table.on_decoded([RIGHT] * gained)
        self._length.on_verified(rows, gained)
        if gained == rows and right is not None:
            self._length.on_foretold(right)

    def on_prefilled(self) -> None:
        """The first token exists."""
        self.foretold = self._table.on_decoded([RIGHT])

    @property
    def plan(self) -> Planned:
        """See `DraftLength.plan`."""
        return self._length.plan

    def draft_count(self) -> int:
        """See `TokenDecoded.drafts`."""
        return self._length.drafts()
