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


LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-4, 1e6
"""Beside 0. Logits that are divided by less or more may not be numbers any more, in float32."""
LEAST_PENALTY, MOST_PENALTY = 1e-4, 1e4
"""Of repetition, for the same reason."""
TEMPERATURES = f"a number of at least 0: 0 itself, or {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:,.0f}"


def check_temperature(temperature: float) -> float:
    """Raises ValueError."""
    if temperature != 0 and not LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE:
        raise ValueError(f"it is {temperature:g}; allowed: {TEMPERATURES}")
    return temperature
