"""When the shadow is brought back to the main model's token and KV rows (OD-MoE section 3.2), and whether it waits."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.errors import ConfigError

AT_ONCE, LATE = "at-once", "late"
"""Departures of the shadow. `LATE` waits for a due alignment, as the paper's does. `AT_ONCE` goes on from its own token
and KV rows, and goes back where the alignment differs."""

ALL_ROWS, NEWEST_ROWS = "all", "newest"
"""What a KV alignment brings: every row that the shadow has not had, or those of the newest pass alone, as OD-MoE has
it (4.2: "all KV cache corresponding to the newly generated token"). Rows of passes before then stay the shadow's."""

_AHEAD = {AT_ONCE: 1, LATE: 0}
"""Departure -> due alignments that a pass may be ahead of. A pass ahead of a second one would surely be run again."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """Periods in decode passes, one for the token and one for the KV rows; 1: every pass, 0: never."""

    token_period: int = 1
    kv_period: int = 1
    kv_rows: str = ALL_ROWS

    def __post_init__(self) -> None:
        for name, value in (("--align-token", self.token_period), ("--align-kv", self.kv_period)):
            if value < 0:
                raise ConfigError(f"{name} is {value}; allowed: 0 (never), 1 (every token), 2, 3, ...")
        if self.kv_rows not in (ALL_ROWS, NEWEST_ROWS):
            raise ConfigError(f"--align-kv-rows is {self.kv_rows}; allowed: {ALL_ROWS}, {NEWEST_ROWS}")

    def token_due(self, step: int) -> bool:
        """Does decode pass `step` (0: the first) read the main model's token?"""
        return self.token_period > 0 and step % self.token_period == 0

    def kv_due(self, step: int) -> bool:
        """Are the main model's KV rows brought over before decode pass `step`?"""
        return self.kv_period > 0 and step % self.kv_period == 0

    @property
    def ever(self) -> bool:
        """Is the shadow aligned at all?"""
        return self.token_period > 0 or self.kv_period > 0

    def due(self, step: int) -> bool:
        """Is the shadow aligned in any way before decode pass `step`?"""
        return self.token_due(step) or self.kv_due(step)

    def may_start(self, step: int, announced: int, lookahead: int, departure: str) -> bool:
        """May the shadow run decode pass `step`, when the main model has announced passes up to `announced`?"""
        if step <= announced:
            return True
        if step > announced + lookahead:
            return False
        missing = sum(self.due(one) for one in range(announced + 1, step + 1))
        return missing <= (_AHEAD[departure] if announced >= 0 else 0)  # prefill's loads need every slot
