"""How many drafts a block verifies: `--draft N` or `--draft auto`.

lengths = DraftLengths("auto", late=False)     one for all requests
length = lengths.opened()                      one for each
rows = length.rows(available, most)            before each pass that decodes
length.verified(rows, gained)                  after it; `foretold` where the table had a draft that was in no block
lengths.stepped(total_rows, seconds)           once a step, for all requests
length.drafts()                                for `TokenDecoded`
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from scheduler.errors import ConfigError

AUTO = "auto"
MOST_ROWS = 16
"""Rows of a block whose length is chosen live."""
MOST_DRAFTS = 63
"""Drafts of a block whose length is given."""

_RIGHT, _TRIALS = 0.8, 4
"""Acceptance before anything is known, and how many drafts' worth this counts."""
_RATE = 1 / 16
"""Weight of the newest draft in the mean acceptance, and of the newest step in the mean step."""
_CAUTION = 0.8
"""Share of the tokens that drafts promise, which must be worth their rows before any are verified: near the threshold,
noise in the acceptance must not switch them on."""
_ROW_SHARE, _ROW_WEIGHT = 0.15, 1.0
"""A further row's time over that of a step of one row, before it was measured, and its weight in squared rows."""
_STALE = 1 / 2048
"""Share of what is known of a row's time that is forgotten with each step, so that it is measured again some day."""


class DraftLength(Protocol):
    """Of one request."""

    def rows(self, available: int, most: int) -> int:
        """Rows of the next pass: the last token and some of the `available` drafts; no more than `most`."""

    def drafts(self) -> int:
        """Passes that the shadow should run ahead, see `TokenDecoded`. 0: no drafts are wanted."""

    def verified(self, rows: int, gained: int) -> None:
        """A pass of so many rows gave `gained` tokens, 1 to `rows`."""

    def foretold(self, right: bool) -> None:
        """There was a draft of a token that the main model chose without verifying it in a block."""


class FixedLength:
    """As many drafts as are there, up to `count`."""

    def __init__(self, count: int, late: bool) -> None:
        self._rows = 1 + count
        self._late = late

    def rows(self, available: int, most: int) -> int:
        return min(self._rows, 1 + available, most)

    def drafts(self) -> int:
        return _ahead(self._rows, self._late)

    def verified(self, rows: int, gained: int) -> None:
        pass

    def foretold(self, right: bool) -> None:
        pass


class StepCost:
    """The seconds of a step by its number of rows, of all requests together: mean + slope * (rows - mean rows).

    The mean follows the last steps. The slope is a least-squares fit, which forgets as steps with another number of
    rows come: those of always the same number say nothing about it.
    """

    def __init__(self) -> None:
        self._rows = self._seconds = 0.0  # means
        self._square = self._product = 0.0  # sums over steps: rows * rows, rows * seconds, both from the mean

    @property
    def known(self) -> bool:
        """A step was measured."""
        return self._seconds > 0

    def stepped(self, rows: int, seconds: float) -> None:
        """A step that only decodes has ended."""
        if not self.known:
            self._rows, self._seconds = rows, seconds
            return
        off_rows, off_seconds = rows - self._rows, seconds - self._seconds
        keep = 1 - (_RATE if abs(off_rows) >= 0.5 else _STALE)
        self._square = keep * self._square + off_rows * off_rows
        self._product = keep * self._product + off_rows * off_seconds
        self._rows += _RATE * off_rows
        self._seconds += _RATE * off_seconds

    @property
    def row_s(self) -> float:
        """Seconds of a further row; at least 0, and no more than a row's share of a step."""
        most = self._seconds / self._rows
        first = self._seconds / (1 + _ROW_SHARE * (self._rows - 1))
        product = self._product + _ROW_WEIGHT * _ROW_SHARE * first
        return min(max(product / (self._square + _ROW_WEIGHT), 0.0), most)

    def seconds(self, rows: int) -> float:
        """Of a step of so many rows. There must have been one."""
        return self._seconds + self.row_s * (rows - self._rows)


class Planned(NamedTuple):
    """Of some requests in a step."""

    requests: int = 0
    rows: int = 0
    tokens: float = 0.0
    """Expected of the rows."""

    def plus(self, other: Planned) -> Planned:
        return Planned(self.requests + other.requests, self.rows + other.rows, self.tokens + other.tokens)

    def without(self, other: Planned) -> Planned:
        rest = self.requests - other.requests, self.rows - other.rows, self.tokens - other.tokens
        return Planned(*rest) if min(rest) >= 0 else Planned()


class DraftLengths:
    """Those of all requests. `draft`: `AUTO`, or a number of drafts. `late`: the shadow departs late. Raises
    ConfigError."""

    def __init__(self, draft: int | str, late: bool) -> None:
        check_draft(draft)
        self.late = late
        self.cost = StepCost()
        self.last = Planned()
        """The last step."""
        self._draft = draft
        self._next = Planned()

    def opened(self) -> DraftLength:
        """Of a new request."""
        return FixedLength(int(self._draft), self.late) if self._draft != AUTO else AutoLength(self)

    def planned(self, one: Planned) -> None:
        """A request's part in the next step."""
        self._next = self._next.plus(one)

    def stepped(self, total_rows: int, seconds: float, decoding: bool = True) -> None:
        """A step has ended. `decoding`: it read no prompt."""
        if decoding:
            self.cost.stepped(total_rows, seconds)
        self.last, self._next = self._next, Planned()


class AutoLength:
    """Chosen live: that with which a step gives most tokens a second, of all requests.

    Of r rows 1 + p + ... + p^(r-1) tokens are expected, p: the share of drafts that were right. A further row costs all
    requests its seconds, so that what the others gain in a step counts too.
    """

    def __init__(self, of_all: DraftLengths) -> None:
        self._all = of_all
        self._right, self._trials = _RIGHT, _TRIALS
        self._last = Planned()

    @property
    def acceptance(self) -> float:
        """Share of the latest drafts that were right."""
        return self._right

    def rows(self, available: int, most: int) -> int:
        rows = min(self._best(), 1 + available, most)
        self._last = Planned(1, rows, expected(self._right, rows))
        self._all.planned(self._last)
        return rows

    def drafts(self) -> int:
        return _ahead(self._best(), self._all.late)

    def verified(self, rows: int, gained: int) -> None:
        for _ in range(gained - 1):
            self.foretold(True)
        if gained < rows:
            self.foretold(False)

    def foretold(self, right: bool) -> None:
        self._trials += 1
        self._right += (right - self._right) * max(_RATE, 1 / self._trials)

    def _best(self) -> int:
        """Rows that would be best if there were drafts enough."""
        cost, others = self._all.cost, self._all.last.without(self._last)
        if not cost.known:
            return 1
        none = (1 + others.requests) / cost.seconds(1 + others.requests)  # where nobody has drafts
        best, most = 1, (1 + others.tokens) / cost.seconds(1 + others.rows)
        tokens = 1.0
        for rows in range(2, MOST_ROWS + 1):
            tokens += self._right ** (rows - 1)
            rate = (tokens + others.tokens) / cost.seconds(rows + others.rows)
            sure = 1 + _CAUTION * (tokens - 1) + others.requests
            if rate > most and sure > none * cost.seconds(rows + others.requests):
                best, most = rows, rate
        return best


def expected(right: float, rows: int) -> float:
    """Tokens of a block in which each draft is right with this probability, if those before it are."""
    return sum(right**row for row in range(rows))


def check_draft(draft: int | str) -> None:
    """Raises ConfigError."""
    if draft != AUTO and (not isinstance(draft, int) or not 0 <= draft <= MOST_DRAFTS):
        raise ConfigError(f"--draft is {draft}; allowed: {AUTO}, 0 (no drafts), 1, ... {MOST_DRAFTS}")


def _ahead(rows: int, late: bool) -> int:
    """While blocks of so many rows are verified, a shadow that departs at once drafts the next."""
    if rows == 1:
        return 0
    return rows - 1 if late else 2 * rows - 1
