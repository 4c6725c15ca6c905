"""A core from its configuration."""

from __future__ import annotations

from scheduler.core.groups import RoundRobin
from scheduler.core.machine import Core
from scheduler.policies.choices import Choices
from scheduler.policies.registry import strategy_of


def make_core(choices: Choices) -> Core:
    """A new core with new policies. Raises ConfigError."""
    return Core(
        choices.shape,
        RoundRobin(choices.group_size),
        choices.alignment,
        choices.mini_batch,
        strategy_of(choices),
        choices.prefill,
    )
