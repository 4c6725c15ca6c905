"""When the shadow is brought back to the main model's token and KV rows (OD-MoE section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Alignment:
    """Periods in decode passes, one for the token and one for the KV rows; 1: every pass, 0: never."""

    token_period: int = 1
    kv_period: int = 1

    def __post_init__(self) -> None:
        for name, value in (("--align-token", self.token_period), ("--align-kv", self.kv_period)):
            if value < 0:
                raise ConfigError(f"{name} is {value}; allowed: 0 (never), 1 (every token), 2, 3, ...")

    def token_due(self, step: int) -> bool:
        """Does decode pass `step` (0: the first) read the main model's token?"""
        return self.token_period > 0 and step % self.token_period == 0

    def kv_due(self, step: int) -> bool:
        """Are the main model's KV rows brought over before decode pass `step`?"""
        return self.kv_period > 0 and step % self.kv_period == 0

    def due(self, step: int) -> bool:
        """Must the shadow wait for the main model before decode pass `step` (its late departure)?"""
        return self.token_due(step) or self.kv_due(step)
