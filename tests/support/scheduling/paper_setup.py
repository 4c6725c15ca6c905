"""Mixtral-8x7B on the testbed of the OD-MoE paper, as a plan takes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scheduler.alignment import LATE
from scheduler.planning.scaling import Hardware, Policy, Setup
from scheduler.policies.system_config import SystemConfig
from scheduler.timing.profile import find_profile
from scheduler.types import ModelSize

PROFILE = find_profile("rtx3090-1gbe")
EXPERT = 3 * 4096 * 14336
ATTENTION = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
READ = ATTENTION + 32 * (8 * 4096 + 2 * 4096) + 4096 + 4096 * 32000
MIXTRAL = ModelSize(
    "Mixtral-8x7B",
    dtype="float32",
    depth=32,
    layers=32,
    experts=8,
    top_k=2,
    hidden=4096,
    expert=EXPERT,
    experts_all=32 * 8 * EXPERT,
    dense=READ + 4096 * 32000,
    read=READ,
    linear=ATTENTION,
    cache_token=32 * 2048,
    cache=512 * 32 * 2048,
    context=512,
    context_max=32768,
    item_bytes=4,
)
PAPER = Setup(MIXTRAL, Hardware(PROFILE, 8), Policy(chosen=SystemConfig(departure=LATE)))


def few_layers(layers: int) -> Setup:
    """The paper's testbed with that many of Mixtral's 32 layers, each as there."""

    def part(elements: int) -> int:
        return elements * layers // 32

    m = MIXTRAL
    model = replace(
        m,
        depth=layers,
        layers=layers,
        experts_all=part(m.experts_all),
        dense=part(m.dense),
        read=part(m.read),
        linear=part(m.linear),
        cache_token=part(m.cache_token),
        cache=part(m.cache),
    )
    return replace(PAPER, model=model)


def on(setup: Setup, **different: Any) -> Setup:
    """The same on other hardware."""
    return replace(setup, hardware=replace(setup.hardware, **different))
