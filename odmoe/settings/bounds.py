"""Bounds on several settings together: each alone would be allowed, and all of them would fill the memory."""

from __future__ import annotations

from collections.abc import Callable

from odmoe.settings.table import flag
from scheduler.errors import ConfigError
from scheduler.limits import MAX_SLOTS


def check_slots(workers: int, slots: int, named: Callable[[str], str] = flag) -> None:
    """Raises ConfigError if all workers together have too many slots."""
    if workers * slots > MAX_SLOTS:
        raise ConfigError(
            f"{named('slots')} is {slots} with {workers} workers, {workers * slots:,} together; "
            f"allowed: 1 to {MAX_SLOTS // workers}"
        )


def check_experts(layers: int, experts: int) -> None:
    """Raises ConfigError if the layers of a simulated model together have too many experts."""
    if layers * experts > MAX_SLOTS:
        raise ConfigError(
            f"--experts is {experts} with {layers} layers, {layers * experts:,} together; "
            f"allowed: 1 to {MAX_SLOTS // layers}"
        )
