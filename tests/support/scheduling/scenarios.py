"""Scenarios and core configurations with the fields of the system beside the others, as flags have them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from scheduler.policies.system_config import CoreConfig, SystemConfig
from scheduler.simulation.scenario import Scenario
from scheduler.timing.profile import Profile
from scheduler.types import ModelShape

_OF_SYSTEM = frozenset(field.name for field in fields(SystemConfig))


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    system = {name: value for name, value in values.items() if name in _OF_SYSTEM}
    rest = {name: value for name, value in values.items() if name not in _OF_SYSTEM}
    return {**rest, "system": SystemConfig(**system)}


def scenario_of(profile: Profile, **values: Any) -> Scenario:
    return Scenario(profile, **_nested(values))


def core_config_of(shape: ModelShape, group_size: int, **values: Any) -> CoreConfig:
    return CoreConfig(shape, group_size, **_nested(values))
