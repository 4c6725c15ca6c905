"""What the name of a policy stands for. A policy of your own takes a class, and an entry here or in a file of your own
(`scheduler.policies.policy_file`)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from scheduler.alignment import AT_ONCE, LATE
from scheduler.errors import ConfigError
from scheduler.policies.baselines.hobbit import Mixed, Multidimensional, Stacked
from scheduler.policies.baselines.mixtral_offloading import NextGate
from scheduler.policies.placement import (
    Balance,
    DeviceOnly,
    HostOnly,
    Placement,
    PrefillPipeline,
    PrintedBalance,
    ResidentOnly,
)
from scheduler.policies.precision import FULL, INT2, INT4, Full, Popular, Precision, Uniform
from scheduler.policies.predictors.base import NoPrediction, Predictor, RandomPredictor
from scheduler.policies.predictors.gate_based import CrossLayer, NextLayer
from scheduler.policies.predictors.token_wise import TokenWise
from scheduler.policies.residency.arc import ARC, ShallowARC
from scheduler.policies.residency.base import Everything, NoCache, Residency
from scheduler.policies.residency.lrfu import LRFU
from scheduler.policies.residency.lru import LFU, LRU, Static
from scheduler.policies.residency.shares import Shares
from scheduler.policies.routers import ExpertCache, Router, TopK
from scheduler.policies.strategy import Strategy
from scheduler.policies.system_config import SystemConfig
from scheduler.types import ModelShape
from scheduler.unknown_names import unknown

T = TypeVar("T")
SHADOW = (
    "shadow",
    "align_token",
    "align_kv",
    "align_kv_rows",
    "align_states",
    "departure",
    "recall",
    "acceptance",
    "draft",
)
SMALLER = ("smaller_forms",)
_FORESEES = ("predictions",)
_BY_GATES = ("prefetch", *_FORESEES)
_TOKEN_WISE = ("prefetch", "token_predictor", "predictor_learning_rate", *_FORESEES)


@dataclass(frozen=True, slots=True)
class Choice(Generic[T]):
    """One policy that can be chosen by name."""

    about: str
    """One line for people, with the paper's section if it has one."""
    make: Callable[..., T]
    """From the model's shape and the system's configuration."""
    reads: tuple[str, ...] = ()
    """Settings that only some policies read. One that no chosen policy reads is refused."""
    exact: bool = True
    """Answers stay those of the model."""
    exact_at_0: str | None = None
    """A number that the policy reads. If it is 0, answers stay those of the model after all."""
    is_bound: bool = False
    """It knows the routes to come, which only a simulation does."""
    forms: tuple[str, ...] = (FULL,)
    """Of a precision: the forms in which it loads experts, the largest first."""
    file: str = ""
    """The file outside of this project that it is from (`scheduler.policies.policy_file`)."""


PREDICTORS: dict[str, Choice[Predictor]] = {
    "sep": Choice("A quantised shadow of the model (OD-MoE 3)", lambda shape, c: NoPrediction(shape), SHADOW),
    "none": Choice("No prediction: loads begin at the gate", lambda shape, c: NoPrediction(shape)),
    "random": Choice("Random experts (OD-MoE Fig. 8)", lambda shape, c: RandomPredictor(shape)),
    "next-gate": Choice(
        "The next layer's gate on this layer's gate input",
        lambda shape, c: NextGate(shape, c.prefetch),
        _BY_GATES,
    ),
    "cross-layer": Choice(
        "Cross-layer gate above a percentile (Fate 4.2)", lambda shape, c: CrossLayer(shape), _FORESEES
    ),
    "impact": Choice(
        "Gates of three layers, by hidden load time (HybriMoE)",
        lambda shape, c: _from("baselines.hybrimoe").Impact(shape, **_drop_none(prefetch=c.prefetch)),
        _BY_GATES,
    ),
    "next-layer": Choice(
        "The next layer's attention and gate (Importance 5.2)",
        lambda shape, c: NextLayer(shape, c.alpha),
        ("alpha", *_FORESEES),
    ),
    "stacked": Choice("Gates of three layers (HOBBIT)", lambda shape, c: Stacked(shape, c.prefetch), _BY_GATES),
    "token-wise": Choice(
        "A trained network a layer, N experts (SMOE IV-D)",
        lambda shape, c: TokenWise(shape, **_drop_none(prefetch=c.prefetch)),
        _TOKEN_WISE,
    ),
    "token-wise-adaptive": Choice(
        "The same, N follows the recall (SMOE IV-E)",
        lambda shape, c: TokenWise(shape, adaptive=True, **_drop_none(prefetch=c.prefetch)),
        _TOKEN_WISE,
    ),
    "token-wise-flex": Choice(
        "The same, only where a prefetch pays (SMOE IV-E)",
        lambda shape, c: TokenWise(shape, flex=True, **_drop_none(prefetch=c.prefetch)),
        _TOKEN_WISE,
    ),
    "perfect": Choice(
        "The next layers' experts, always right (a bound)",
        lambda shape, c: _from("residency.belady").PerfectPredictor(shape),
        is_bound=True,
    ),
    "path": Choice(
        "Which experts followed which before (EAP)",
        lambda shape, c: _from("baselines.eap").ActivationPath(shape),
    ),
    "traces": Choice(
        "Activations of similar requests before (MoE-Infinity)",
        lambda shape, c: _from("baselines.moe_infinity").RequestTraces(shape),
    ),
}
RESIDENCIES: dict[str, Choice[Residency]] = {
    "none": Choice("No cache: an expert leaves once computed (OD-MoE)", lambda shape, c: NoCache()),
    "all": Choice("Every expert stays; needs a slot for each", lambda shape, c: Everything()),
    "lru": Choice("The least recently used expert leaves", lambda shape, c: LRU(shape)),
    "layer-lru": Choice("LRU in equal shares of the layers", lambda shape, c: Shares(shape)),
    "lfu": Choice("The least frequently used expert leaves", lambda shape, c: LFU(shape)),
    "lrfu": Choice("The least recent and frequent expert leaves (LRFU)", lambda shape, c: LRFU(shape)),
    "arc": Choice("ARC over the experts of all layers", lambda shape, c: ARC(shape)),
    "s3-fifo": Choice(
        "A small queue and a main one (S3-FIFO)", lambda shape, c: _from("residency.s3_fifo").S3FIFO(shape)
    ),
    "least-stale": Choice(
        "What this pass has not used leaves (Least-Stale, SpecMD)",
        lambda shape, c: _from("residency.least_stale").LeastStale(shape),
    ),
    "belady": Choice(
        "The one that is used again last leaves (a bound)",
        lambda shape, c: _from("residency.belady").Belady(shape),
        is_bound=True,
    ),
    "static": Choice("What the first prompt used most stays for good", lambda shape, c: Static(shape)),
    "shallow-arc": Choice("The first layers whole, ARC in the others (Fate 4.4)", lambda shape, c: ShallowARC(shape)),
    "score": Choice(
        "The lowest mean score leaves (Importance 5.3)", lambda shape, c: _from("residency.scores").ScoreWindow(shape)
    ),
    "mrs": Choice(
        "The lowest smoothed score leaves (HybriMoE)", lambda shape, c: _from("baselines.hybrimoe").RecentScore(shape)
    ),
    "multidimensional": Choice(
        "LRU, LFU, LHU and layer distance, weighed (HOBBIT 3.4)", lambda shape, c: Multidimensional(shape)
    ),
    "frequent": Choice(
        "Equal shares of the layers, by frequency (SMOE IV-E)",
        lambda shape, c: _from("residency.frequency").Frequent(shape),
    ),
    "traces": Choice(
        "The lowest activation ratio leaves (MoE-Infinity)",
        lambda shape, c: _from("baselines.moe_infinity").ActivationAware(shape),
    ),
    "sensitive": Choice(
        "Shares of the layers by dynamic programming (AdapMoE)",
        lambda shape, c: _from("baselines.adapmoe").LayerShares(shape),
    ),
}
HOST_RESIDENCIES = {name: RESIDENCIES[name] for name in ("lru", "lfu", "lrfu", "arc", "s3-fifo", "belady")}
"""Of host memory: those under which any expert may stay in any slot."""
ROUTERS: dict[str, Choice[Router]] = {
    "top-k": Choice("The model's own", lambda shape, c: TopK()),
    "expert-cache": Choice(
        "Residents replace unimportant experts (Importance)",
        lambda shape, c: ExpertCache(**_drop_none(alpha=c.alpha)),
        ("alpha",),
        exact=False,
        exact_at_0="alpha",
    ),
    "skip": Choice(
        "Leaves out the least experts of a row (AdapMoE)",
        lambda shape, c: _from("baselines.adapmoe").Skip(**_drop_none(threshold=c.alpha)),
        ("alpha",),
        exact=False,
        exact_at_0="alpha",
    ),
}
PLACEMENTS: dict[str, Choice[Placement]] = {
    "device": Choice("On the device, after a load", lambda shape, c: DeviceOnly()),
    "host": Choice("On the host", lambda shape, c: HostOnly()),
    "resident": Choice("Resident experts on the device, the others on the host", lambda shape, c: ResidentOnly()),
    "balance": Choice("Least maximum of loads and host (Importance, 5.4)", lambda shape, c: Balance()),
    "balance-printed": Choice("The same by two pointers (its Alg. 2)", lambda shape, c: PrintedBalance()),
    "split": Choice("Split in prefill, then misses on the host (SMOE, Alg. 1)", lambda shape, c: PrefillPipeline()),
    "hybrid": Choice(
        "Greedy schedule of device and host (HybriMoE)", lambda shape, c: _from("baselines.hybrimoe").Hybrid()
    ),
}
PRECISIONS: dict[str, Choice[Precision]] = {
    "full": Choice("As the store has them", lambda shape, c: Full()),
    "int4": Choice("HQQ at four bits", lambda shape, c: Uniform(INT4), SMALLER, exact=False, forms=(INT4,)),
    "int2": Choice("HQQ at two bits", lambda shape, c: Uniform(INT2), SMALLER, exact=False, forms=(INT2,)),
    "popular": Choice(
        "int4, and int2 for unpopular experts in prefill (Fate)",
        lambda shape, c: Popular(),
        SMALLER,
        exact=False,
        forms=(INT4, INT2),
    ),
    "popular-int2": Choice(
        "popular, and int2 for what was not prefetched (Fate 5.3)",
        lambda shape, c: Popular(misses=INT2),
        SMALLER,
        exact=False,
        forms=(INT4, INT2),
    ),
    "mixed": Choice(
        "Fewer bits for less important experts (HOBBIT)",
        lambda shape, c: Mixed(),
        SMALLER,
        exact=False,
        forms=(FULL, INT4),
    ),
}
DEPARTURES: dict[str, Choice[str]] = {
    AT_ONCE: Choice("From its own token, and back if that was wrong", lambda shape, c: AT_ONCE),
    LATE: Choice("After the alignment that is due (OD-MoE 3.2)", lambda shape, c: LATE),
}
PREFILLS: dict[str, Choice[str]] = {
    "ahead": Choice("Every expert is loaded ahead of its gate", lambda shape, c: "ahead"),
    "pipelined": Choice("Loads begin at the gate and overlap computations", lambda shape, c: "pipelined"),
    "in-turn": Choice("Loads, transfers and computations one after the other", lambda shape, c: "in-turn"),
}
CHOICES: dict[str, dict[str, Choice[Any]]] = {
    "predictor": PREDICTORS,
    "residency": RESIDENCIES,
    "host_residency": HOST_RESIDENCIES,
    "router": ROUTERS,
    "placement": PLACEMENTS,
    "precision": PRECISIONS,
    "prefill": PREFILLS,
    "departure": DEPARTURES,
}
"""Field of SystemConfig -> its names."""


def _flag(name: str) -> str:
    return f"--{name}"


def check(system: SystemConfig, named: Callable[[str], str] = _flag) -> None:
    """Every name and number is one that there is. `named`: how messages call a field. Raises ConfigError."""
    for declared in fields(SystemConfig):
        value, label = getattr(system, declared.name), named(declared.name)
        if (names := CHOICES.get(declared.name)) is not None:
            if value not in names:
                raise ConfigError(unknown(label, value, names, "odmoe systems"))
        elif value is not None and not declared.metadata["bounds"][0] <= value <= declared.metadata["bounds"][1]:
            raise ConfigError(f"{label} is {value:.10g}; allowed: {declared.metadata['allowed']}")


def readers(setting: str) -> tuple[str, ...]:
    """The policies that read a setting; none if every system does."""
    return tuple(name for names in CHOICES.values() for name, choice in names.items() if setting in choice.reads)


def is_read(setting: str, system: SystemConfig) -> bool:
    """Whether a chosen policy reads the setting, or every system does."""
    chosen = (names[getattr(system, field)] for field, names in CHOICES.items())
    return not readers(setting) or any(setting in choice.reads for choice in chosen)


def strategy_of(shape: ModelShape, system: SystemConfig) -> Strategy:
    """New policies for one scheduler. Raises ConfigError."""
    check(system)
    return Strategy(
        PREDICTORS[system.predictor].make(shape, system),
        RESIDENCIES[system.residency].make(shape, system),
        ROUTERS[system.router].make(shape, system),
        PLACEMENTS[system.placement].make(shape, system),
        PRECISIONS[system.precision].make(shape, system),
        predicts=system.predictor not in ("sep", "none"),
        named=inexact(system),
        host_residency=HOST_RESIDENCIES[system.host_residency].make(shape, system),
    )


def foresight_of(shape: ModelShape, system: SystemConfig) -> str | None:
    """What the main model computes for the predictor; None for nothing, and for a predictor that is not here."""
    predictor = PREDICTORS.get(system.predictor)
    return None if predictor is None else predictor.make(shape, system).foresight


def residency_of(shape: ModelShape, system: SystemConfig) -> Residency:
    """The cache policy alone. Raises ConfigError."""
    check(system)
    return RESIDENCIES[system.residency].make(shape, system)


def forms_of(system: SystemConfig) -> tuple[str, ...]:
    """The forms in which experts are loaded. Raises ConfigError."""
    check(system)
    return PRECISIONS[system.precision].forms


def foresees(system: SystemConfig) -> bool:
    """Whether the main model computes what its predictor reads. Raises ConfigError."""
    check(system)
    return strategy_of(ModelShape((0,), 2, 1), system).predictor.foresight is not None


def reads_scores(system: SystemConfig) -> bool:
    """Whether a policy reads scores of gates, of those that have fired or of those to come."""
    strategy = strategy_of(ModelShape((0,), 2, 1), system)
    return strategy.wants_scores or strategy.predictor.foresight is not None


def bounds(system: SystemConfig) -> dict[str, str]:
    """The chosen policies that know the routes to come, by field."""
    chosen = {name: getattr(system, name) for name in CHOICES}
    return {name: value for name, value in chosen.items() if CHOICES[name][value].is_bound}


def caches(system: SystemConfig) -> bool:
    """Whether experts stay in their slots after they were computed."""
    return system.residency != "none"


def keeps_all(system: SystemConfig) -> bool:
    """Whether every expert stays in a slot of its own, so that there must be a slot for each."""
    return system.residency == "all"


def needs_host(system: SystemConfig) -> bool:
    """Whether it makes no sense without a host that computes: nothing would be left of it on a device alone."""
    return system.placement == "host"


def remembers_routes(system: SystemConfig) -> str | None:
    """The policy whose worth depends on how alike the experts of one token and of others are, in words; None without
    one."""
    if caches(system) and not keeps_all(system):
        return f"--residency {system.residency}"
    if system.predictor not in ("none", "random", "sep"):
        return f"--predictor {system.predictor}"
    return None


def is_exact(system: SystemConfig) -> bool:
    """Whether the answer is the model's own. Raises ConfigError."""
    return not inexact(system)


def inexact(system: SystemConfig) -> dict[str, str]:
    """The chosen policies that change answers, by field. Raises ConfigError."""
    check(system)
    found = {}
    for field, names in CHOICES.items():
        choice = names[name := getattr(system, field)]
        if not choice.exact and not (choice.exact_at_0 and getattr(system, choice.exact_at_0) == 0):
            found[field] = name
    return found


def _from(module: str) -> Any:
    """A module that takes numpy: it costs a third of a second, and most commands need none of it."""
    return importlib.import_module(f"scheduler.policies.{module}")


def _drop_none(**options: Any) -> dict[str, Any]:
    """Those that are given; a policy's own default holds for the others."""
    return {name: value for name, value in options.items() if value is not None}
