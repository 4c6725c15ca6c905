"""What each choice's name stands for. Adding a policy of your own takes a class, and a line here."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from scheduler.errors import ConfigError
from scheduler.policies.placement import Balance, DeviceOnly, HostOnly, Hybrid, Placement, PrefillPipeline, ResidentOnly
from scheduler.policies.precision import Full, Mixed, Popular, Precision, Uniform
from scheduler.policies.predictors.base import Predictor, RandomPredictor, Silent
from scheduler.policies.predictors.gate_based import CrossLayer, NextGate, NextLayer, Stacked
from scheduler.policies.predictors.impact import Impact
from scheduler.policies.predictors.token_wise import TokenWise
from scheduler.policies.residency.activation import ActivationAware
from scheduler.policies.residency.arc import ARC, ShallowARC
from scheduler.policies.residency.base import Cacheless, Everything, Residency
from scheduler.policies.residency.lru import LFU, LRU, Static
from scheduler.policies.residency.scores import RecentScore, ScoreWindow
from scheduler.policies.residency.shares import Shares
from scheduler.policies.routers import ExpertCache, Router, Skip, TopK
from scheduler.policies.strategy import Strategy

if TYPE_CHECKING:
    from scheduler.policies.choices import Choices

T = TypeVar("T")

PREDICTORS: dict[str, Callable[[Choices], Predictor]] = {
    "sep": lambda c: Silent(c.shape),  # what it says comes from the shadow, as events
    "none": lambda c: Silent(c.shape),
    "random": lambda c: RandomPredictor(c.shape),
    "next-gate": lambda c: NextGate(c.shape, c.prefetch),
    "cross-layer": lambda c: CrossLayer(c.shape),
    "impact": lambda c: Impact(c.shape, **_given(prefetch=c.prefetch)),
    "next-layer": lambda c: NextLayer(c.shape, c.alpha),
    "stacked": lambda c: Stacked(c.shape, c.prefetch),
    "token-wise": lambda c: TokenWise(c.shape, **_given(prefetch=c.prefetch)),
    "token-wise-adaptive": lambda c: TokenWise(c.shape, adaptive=True, **_given(prefetch=c.prefetch)),
    "token-wise-flex": lambda c: TokenWise(c.shape, flex=True, **_given(prefetch=c.prefetch)),
    "path": lambda c: _from("predictors.history").ActivationPath(c.shape),
    "traces": lambda c: _from("predictors.history").RequestTraces(c.shape),
}
RESIDENCIES: dict[str, Callable[[Choices], Residency]] = {
    "none": lambda c: Cacheless(),
    "all": lambda c: Everything(),
    "lru": lambda c: LRU(c.shape),
    "layer-lru": lambda c: Shares(c.shape),
    "lfu": lambda c: LFU(c.shape),
    "arc": lambda c: ARC(c.shape),
    "static": lambda c: Static(c.shape),
    "shallow-arc": lambda c: ShallowARC(c.shape),
    "score": lambda c: ScoreWindow(c.shape),
    "mrs": lambda c: RecentScore(c.shape),
    "frequent": lambda c: _from("residency.frequency").Frequent(c.shape),
    "traces": lambda c: ActivationAware(c.shape),
    "sensitive": lambda c: _from("residency.sensitivity").LayerShares(c.shape),
}
ROUTERS: dict[str, Callable[[Choices], Router]] = {
    "top-k": lambda c: TopK(),
    "expert-cache": lambda c: ExpertCache(**_given(alpha=c.alpha)),
    "skip": lambda c: Skip(**_given(threshold=c.alpha)),
}
PLACEMENTS: dict[str, Callable[[Choices], Placement]] = {
    "device": lambda c: DeviceOnly(),
    "host": lambda c: HostOnly(),
    "resident": lambda c: ResidentOnly(),
    "balance": lambda c: Balance(),
    "split": lambda c: PrefillPipeline(),
    "hybrid": lambda c: Hybrid(),
}
PRECISIONS: dict[str, Callable[[], Precision]] = {
    "full": Full,
    "int4": lambda: Uniform("int4"),
    "int2": lambda: Uniform("int2"),
    "popular": Popular,
    "mixed": Mixed,
}


def heeding(number: str) -> tuple[str, ...]:
    """Predictors and routers that are made with that number of the choices, `alpha` or `prefetch`: those whose line
    above reads it, and those of which that cannot be seen."""
    makers: list[tuple[str, Any]] = [*PREDICTORS.items(), *ROUTERS.items()]
    read = {name: getattr(getattr(make, "__code__", None), "co_names", (number,)) for name, make in makers}
    return tuple(name for name, names in read.items() if number in names)


def _from(module: str) -> Any:
    """A module that takes numpy: it costs a third of a second, and most commands need none of it."""
    return importlib.import_module(f"scheduler.policies.{module}")


def strategy_of(choices: Choices) -> Strategy:
    """Five new objects, of one scheduler. Raises ConfigError."""
    return Strategy(
        _made(PREDICTORS, "predictor", choices.predictor, choices),
        residency_of(choices),
        _made(ROUTERS, "router", choices.router, choices),
        _made(PLACEMENTS, "placement", choices.placement, choices),
        _precision_of(choices.precision),
        predicts=choices.predictor not in ("sep", "none"),
    )


def residency_of(choices: Choices) -> Residency:
    """Raises ConfigError."""
    return _made(RESIDENCIES, "residency", choices.residency, choices)


def forms_of(precision: str) -> tuple[str, ...]:
    """In which forms experts travel, by the name of the choice. Raises ConfigError."""
    return _precision_of(precision).forms


def _precision_of(name: str) -> Precision:
    if name not in PRECISIONS:
        raise ConfigError(f"--precision is {name!r}; allowed: {', '.join(PRECISIONS)}")
    return PRECISIONS[name]()


def _made(of: dict[str, Callable[[Choices], T]], flag: str, name: str, choices: Choices) -> T:
    if name not in of:
        raise ConfigError(f"--{flag} is {name!r}; allowed: {', '.join(of)}")
    return of[name](choices)


def _given(**options: Any) -> dict[str, Any]:
    """Those that were said; a policy's own default holds for the others."""
    return {name: value for name, value in options.items() if value is not None}
