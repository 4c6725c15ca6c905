"""All that a scheduler is made with, as plain values that can be written down."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from scheduler.alignment import Alignment
from scheduler.core import Core
from scheduler.placement import RoundRobin
from scheduler.predictors import make_predictor
from scheduler.residency import make_residency
from scheduler.types import ModelShape

Predictor = Literal["sep", "random", "none"]
Residency = Literal["none", "all"]
Prefill = Literal["ahead", "in-turn"]
PREDICTORS: tuple[str, ...] = get_args(Predictor)
RESIDENCIES: tuple[str, ...] = get_args(Residency)
PREFILLS: tuple[str, ...] = get_args(Prefill)


@dataclass(frozen=True, slots=True)
class Choices:
    """See `Core`; `predictor`, `residency` and `prefill` (ahead, in-turn) by name, as the settings have them."""

    shape: ModelShape
    group_size: int
    alignment: Alignment = field(default_factory=Alignment)
    mini_batch: int | None = None
    predictor: str = "sep"
    residency: str = "none"
    prefill: str = "ahead"

    def core(self) -> Core:
        """Raises ConfigError."""
        return Core(
            self.shape, RoundRobin(self.group_size), self.alignment, self.mini_batch,
            predictor=make_predictor(self.predictor), residency=make_residency(self.residency),
            prefill_ahead=self.prefill == "ahead",
        )  # fmt: skip
