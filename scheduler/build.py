"""A core from its configuration."""

from __future__ import annotations

from scheduler.core.groups import RoundRobin
from scheduler.core.machine import Core
from scheduler.policies.registry import strategy_of
from scheduler.policies.system_config import CoreConfig


def make_core(config: CoreConfig) -> Core:
    """A new core with new policies. Raises ConfigError."""
    return Core(
        config.shape,
        RoundRobin(config.group_size),
        config.alignment,
        config.mini_batch,
        strategy_of(config.shape, config.system),
        config.system.prefill,
    )
