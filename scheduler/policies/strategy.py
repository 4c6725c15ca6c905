"""The choices of a system, as the objects that make them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.policies.guard import Guarded
from scheduler.policies.placement import DeviceOnly, Placement
from scheduler.policies.precision import Full, Precision
from scheduler.policies.predictors.base import NoPrediction, Predictor
from scheduler.policies.residency.base import NoCache, Residency
from scheduler.policies.residency.lrfu import LRFU
from scheduler.policies.routers import Router, TopK
from scheduler.types import ModelShape


@dataclass(frozen=True, slots=True)
class Strategy:
    """Of one scheduler. `predicts`: whether the predictor, and not the shadow or nobody, says what is coming. `named`:
    the names of the choices that change answers, by field."""

    predictor: Predictor
    residency: Residency
    router: Router
    placement: Placement
    precision: Precision
    predicts: bool = False
    named: Mapping[str, str] = field(default_factory=dict)
    host_residency: Residency = field(default_factory=NoCache)
    """Of the workers' host memory."""

    @property
    def wants_scores(self) -> bool:
        """Whether any of them reads what gates think of the experts that they did not choose."""
        residencies = self.residency.wants_scores or self.host_residency.wants_scores
        return residencies or self.router.wants_scores or self.precision.wants_scores

    @property
    def guarded(self) -> tuple[Guarded, ...]:
        """Those that are not this project's."""
        residencies = self.residency, self.host_residency
        chosen = (self.predictor, *residencies, self.router, self.placement, self.precision)
        return tuple(one for one in chosen if isinstance(one, Guarded))

    @property
    def exact(self) -> bool:
        """Whether the answer is the model's own."""
        return self.router.exact and self.precision.exact


def od_moe(shape: ModelShape) -> Strategy:
    """Nobody stays, the shadow predicts, and nothing is approximated."""
    return Strategy(NoPrediction(shape), NoCache(), TopK(), DeviceOnly(), Full(), host_residency=LRFU(shape))
