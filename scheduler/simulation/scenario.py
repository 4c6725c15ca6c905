"""What is simulated: cluster, choices and lengths, checked when made."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from scheduler import types as t
from scheduler.alignment import Alignment
from scheduler.errors import ConfigError
from scheduler.policies.choices import PREFILLS, Choices
from scheduler.policies.registry import PLACEMENTS, PRECISIONS, PREDICTORS, RESIDENCIES, ROUTERS
from scheduler.timing.profile import Profile

PROFILE, RECALL = "rtx3090-1gbe", 0.9734
"""The paper's testbed, and the recall of its int8 shadow."""
_NAMES: dict[str, Collection[str]] = {
    "predictor": PREDICTORS, "residency": RESIDENCIES, "prefill": PREFILLS, "router": ROUTERS, "placement": PLACEMENTS,
    "precision": PRECISIONS,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster, its choices and one request. `tokens`: of the answer, prefill's first one included. `workers`,
    `group_size` None: the profile's. `host`: experts can be computed in host memory, too, beside the workers; the
    profile must have times for that. The choices are those of `Choices`. Raises ConfigError naming the flag."""

    profile: Profile
    prompt_tokens: int = 16
    tokens: int = 64
    workers: int | None = None
    slots: int = 1
    group_size: int | None = None
    alignment: Alignment = field(default_factory=Alignment)
    predictor: str = "sep"
    residency: str = "none"
    prefill: str = "ahead"
    mini_batch: int | None = None
    host: bool = False
    router: str = "top-k"
    placement: str = "device"
    precision: str = "full"
    alpha: float | None = None
    prefetch: int | None = None

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "tokens", "workers", "slots", "group_size", "mini_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; allowed: 1, 2, ...")
        for name, allowed in _NAMES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"--{name} is {getattr(self, name)!r}; allowed: {', '.join(allowed)}")
        if self.group_size is not None and self.group_size > self.worker_count:
            raise ConfigError(f"--group-size is {self.group_size}; allowed: 1 to --workers ({self.worker_count})")

    @property
    def worker_count(self) -> int:
        """How many workers there are."""
        return self.workers or self.profile.workers

    @property
    def group(self) -> int:
        """How many of them serve a layer together."""
        return self.group_size or min(self.profile.group_size, self.worker_count)

    @property
    def shape(self) -> t.ModelShape:
        p = self.profile
        return t.ModelShape(tuple(range(p.layers)), p.experts, p.top_k)

    @property
    def choices(self) -> Choices:
        """What the scheduler is made with."""
        return Choices(
            self.shape, self.group, self.alignment, self.mini_batch, self.predictor, self.residency, self.prefill,
            self.router, self.placement, self.precision, self.alpha, self.prefetch,
        )  # fmt: skip
