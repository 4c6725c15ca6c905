"""The systems whose time to first token is measured, and how each differs from a preset."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scheduler.policies.predictors.base import Foresight
from scheduler.policies.registry import strategy_of
from scheduler.policies.system_config import SystemConfig
from scheduler.policies.systems import SYSTEMS
from scheduler.types import ModelShape

REFERENCE = "on-demand"
IN_TURN = "on-demand, in turn"
ON_HOST = "ktransformers"
IN_FULL = "fate, in full"
VARIANTS: dict[str, dict[str, Any]] = {
    REFERENCE: {"system": REFERENCE},
    IN_TURN: {"system": REFERENCE, "prefill": "in-turn"},
    **{name: {"system": name} for name, preset in SYSTEMS.items() if preset.single_machine},
    IN_FULL: {"system": "fate", "precision": "full"},
}
"""Name -> settings. `on-demand` loads ahead of its gates. `in turn` as Fate's baseline: a layer's experts are loaded
once its gate has fired, and computed once they are there."""
WITH_SHADOW: dict[str, dict[str, Any]] = {name: {"system": name} for name in ("od-moe", "sep-arc")}
"""Measured from the disk only: the recording of a prompt's routes has nothing of a shadow."""
QUICK = (REFERENCE, "smoe", "hybrimoe", "fate", "eap")


def config_of(variant: str) -> SystemConfig:
    """The policies of a variant."""
    settings = dict(VARIANTS[variant])
    return replace(SYSTEMS[settings.pop("system")].config, **settings)


def foresight_of(variant: str) -> Foresight | None:
    """What the main model computes for its predictor."""
    return strategy_of(ModelShape((0,), 2, 1), config_of(variant)).predictor.foresight
