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

STATE_BYTES = 1 << 20
"""Assumed: what a token may take of the link to the shadow for states of recurrent layers, 8 ms at 1 Gbit/s. They are
as large after one token as after many, 78 MB in Qwen3-Next-80B."""

_AHEAD = {AT_ONCE: 1, LATE: 0}
"""Departure -> due alignments that a pass may be ahead of. A pass ahead of a second one would surely be run again."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """Periods in decode passes, one for the token and one for the KV rows; 1: every pass, 0: never."""

    token_period: int = 1
    kv_period: int = 1
    kv_rows: str = ALL_ROWS
    state_period: int | None = None
    """Passes after which the states of recurrent layers go with the KV rows again. None: see `states_every`."""

    def __post_init__(self) -> None:
        periods = {"token": self.token_period, "kv": self.kv_period, "states": self.state_period or 0}
        for name, value in ((f"--align-{kind}", period) for kind, period in periods.items()):
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

    def states_every(self, nbytes: int) -> int:
        """The period of states of so many bytes over a link: as given, or as often as `STATE_BYTES` a token allow.
        Between them the shadow goes on from its own."""
        return self.state_period if self.state_period is not None else max(1, -(-nbytes // STATE_BYTES))

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
