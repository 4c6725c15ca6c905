"""The configuration of a system, declared once, and of the scheduler's core."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from scheduler.alignment import AT_ONCE, Alignment
from scheduler.limits import MAX_EXPERTS
from scheduler.types import ModelShape


def _choice(default: str, heading: str, about: str) -> Any:
    """A policy by its name in `scheduler.policies.registry`. `heading`, `about`: of the flag's help."""
    return field(default=default, metadata={"heading": heading, "about": about})


def _number(kind: type, least: float, most: float, allowed: str, heading: str, about: str) -> Any:
    """A number that some policies read. None: the policy's own."""
    bounds = (least, most)
    return field(
        default=None, metadata={"heading": heading, "about": about, "kind": kind, "bounds": bounds, "allowed": allowed}
    )


@dataclass(frozen=True, slots=True)
class SystemConfig:
    """Which policies make a system, and the numbers that they read. The defaults are those of OD-MoE.

    A field that is declared here is a setting with a flag, and a part of every preset, recording and report.
    `scheduler.policies.registry` has the names that it can take.
    """

    predictor: str = _choice("sep", "Prediction", "Predictor of the next layers' experts")
    residency: str = _choice("none", "Memory", "Eviction policy of the workers' caches")
    router: str = _choice("top-k", "Experiments", "Choice of a token's experts; only top-k is exact")
    placement: str = _choice("device", "Experiments", "Where experts are computed, if the host can compute too")
    precision: str = _choice("full", "Memory", "Precision of loaded experts; only full is exact")
    prefill: str = _choice("ahead", "Experiments", "Order of loads and computations in prefill")
    departure: str = _choice(AT_ONCE, "Prediction", "When the shadow starts a token (late: after its alignment)")
    host_residency: str = _choice("lrfu", "Memory", "Eviction policy of the workers' host memory (--host-memory)")
    alpha: float | None = _number(
        float,
        0,
        1,
        "a number from 0 to 1",
        "Experiments",
        "Score margin of expert-cache and next-layer, or share of the weight that skip leaves out",
    )
    prefetch: int | None = _number(
        int, 1, MAX_EXPERTS, f"1 to {MAX_EXPERTS}", "Prediction", "Most experts of a layer that a predictor prefetches"
    )

    def __post_init__(self) -> None:
        # A caller in Python may give 1 for 1.0; a recording knows only floats.
        for declared in fields(self):
            value = getattr(self, declared.name)
            if declared.metadata.get("kind") is float and type(value) is int:
                object.__setattr__(self, declared.name, float(value))


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """All that a scheduler's core is made with, as plain values that can be written down."""

    shape: ModelShape
    group_size: int
    """Workers that serve a layer together."""
    alignment: Alignment = field(default_factory=Alignment)
    mini_batch: int | None = None
    """Most rows that an expert computes at once in prefill; None: the core's own rule."""
    system: SystemConfig = field(default_factory=SystemConfig)
