"""How many drafts a block verifies: `--draft N` or `--draft auto`.

lengths = DraftLengths("auto", False, 8, 2)    one for all requests
length = lengths.make_length()                 one for each
rows = length.rows(available, most)            before each pass that decodes
length.on_verified(rows, gained)               after it; `on_foretold` for a draft that was in no block
lengths.on_step_ended(total_rows, seconds)     once a step, for all requests
length.drafts()                                for `TokenDecoded`
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from scheduler.drafts.cost import StepCost
from scheduler.drafts.trial import Trial
from scheduler.errors import ConfigError

AUTO = "auto"
MOST_ROWS = 16
"""Rows of a block whose length is chosen live."""
MOST_DRAFTS = 63
"""Drafts of a block whose length is given."""

_RIGHT, _TRIALS = 0.8, 1
"""Acceptance before anything is known, and how many drafts' worth this counts."""
_RATE = 1 / 16
"""Weight of the newest draft in the mean acceptance."""
_LEAST = 0.25
"""Drafts of which fewer are right gain too little, whatever rows cost."""
_CAUTION = 0.8
"""Share of the tokens that drafts promise, which must be worth their rows before any are verified: near the threshold,
noise in the acceptance must not switch them on."""


class Planned(NamedTuple):
    """Of some requests in a step."""

    requests: int = 0
    rows: int = 0
    tokens: float = 0.0
    """Expected of the rows."""
    right: float = 0.0
    """The best acceptance."""
    drafted: bool = False
    """Some drafts were verified or asked for."""

    def plus(self, other: Planned) -> Planned:
        sums = self.requests + other.requests, self.rows + other.rows, self.tokens + other.tokens
        return Planned(*sums, max(self.right, other.right), self.drafted or other.drafted)

    def without(self, other: Planned) -> Planned:
        rest = self.requests - other.requests, self.rows - other.rows, self.tokens - other.tokens
        return Planned(*rest) if min(rest) >= 0 else Planned()


class DraftLength(Protocol):
    """Of one request."""

    plan: Planned
    """Its part in the step for which `rows` was asked last; nothing where the length is given."""

    def rows(self, available: int, most: int) -> int:
        """Rows of the next pass: the last token and some of the `available` drafts; no more than `most`."""

    def drafts(self) -> int:
        """Passes that the shadow should run ahead, see `TokenDecoded`. 0: no drafts are wanted."""

    def on_verified(self, rows: int, gained: int) -> None:
        """A pass of so many rows gave `gained` tokens, 1 to `rows`."""

    def on_foretold(self, right: bool) -> None:
        """There was a draft of a token that the main model chose without verifying it in a block."""


class FixedLength:
    """As many drafts as are there, up to `count`."""

    plan = Planned()

    def __init__(self, count: int, late: bool) -> None:
        self._rows = 1 + count
        self._late = late

    def rows(self, available: int, most: int) -> int:
        return min(self._rows, 1 + available, most)

    def drafts(self) -> int:
        return _ahead(self._rows, self._late)

    def on_verified(self, rows: int, gained: int) -> None:
        pass

    def on_foretold(self, right: bool) -> None:
        pass


class DraftLengths:
    """Those of all requests. `draft`: `AUTO`, or a number of drafts. `late`: the shadow departs late. `experts`: of a
    layer; `top_k`: of a token. Raises ConfigError."""

    def __init__(self, draft: int | str, late: bool, experts: int, top_k: int) -> None:
        check_draft(draft)
        self.late = late
        self.cost = StepCost(experts, top_k)
        self.trial = Trial()
        self.last = Planned()
        """The last step."""
        self.gained = 0
        """Right drafts of the step under way."""
        self._draft = draft

    def make_length(self) -> DraftLength:
        """Of a new request."""
        return FixedLength(int(self._draft), self.late) if self._draft != AUTO else AutoLength(self)

    def on_step_ended(self, plans: Iterable[Planned], total_rows: int, seconds: float, decoding: bool = True) -> None:
        """`plans`: of the requests in the step, after their `on_verified`. `decoding`: it read no prompt."""
        now = Planned()
        for plan in plans:
            now = now.plus(plan)
        if decoding:
            self.cost.on_step_ended(total_rows, seconds)
            if now.requests:
                self.trial.on_step_ended(now.requests, now.drafted, now.right, now.requests + self.gained, seconds)
        self.last, self.gained = now, 0


class AutoLength:
    """Chosen live: that with which a step gives most tokens a second, of all requests.

    Of r rows 1 + p + ... + p^(r-1) tokens are expected, p: the share of drafts that were right. A further row costs all
    requests its seconds, so that what the others gain in a step counts too.
    """

    def __init__(self, of_all: DraftLengths) -> None:
        self._all = of_all
        self._right, self._trials = _RIGHT, _TRIALS
        self.plan = Planned()
        self._asked = 0

    @property
    def acceptance(self) -> float:
        """Share of the latest drafts that were right."""
        return self._right

    def rows(self, available: int, most: int) -> int:
        rows = self._best(min(1 + available, most, MOST_ROWS))
        drafted = rows > 1 or self._asked > 0
        self.plan = Planned(1, rows, expected_tokens(self._right, rows), self._right, drafted)
        return rows

    def drafts(self) -> int:
        self._asked = _ahead(self._best(MOST_ROWS), self._all.late)
        return self._asked

    def on_verified(self, rows: int, gained: int) -> None:
        self._all.gained += gained - 1
        for _ in range(gained - 1):
            self.on_foretold(True)
        if gained < rows:
            self.on_foretold(False)

    def on_foretold(self, right: bool) -> None:
        self._trials += 1
        self._right += (right - self._right) * max(_RATE, 1 / self._trials)

    def _best(self, limit: int) -> int:
        """The best number of rows, at most `limit`."""
        cost, others = self._all.cost, self._all.last.without(self.plan)
        if self._right < _LEAST or not cost.is_known or not self._all.trial.allows(self._right):
            return 1
        none = (1 + others.requests) / cost.seconds(1 + others.requests)  # where nobody has drafts
        best, most = 1, (1 + others.tokens) / cost.seconds(1 + others.rows)
        tokens = 1.0
        for rows in range(2, limit + 1):
            tokens += self._right ** (rows - 1)
            rate = (tokens + others.tokens) / cost.seconds(rows + others.rows)
            sure = 1 + _CAUTION * (tokens - 1) + others.requests
            if rate > most and sure > none * cost.seconds(rows + others.requests):
                best, most = rows, rate
        return best


def expected_tokens(right: float, rows: int) -> float:
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
