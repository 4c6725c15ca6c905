"""Systems by name: five choices each, and nothing more. Any of them can be said otherwise."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from scheduler.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Preset:
    """`about`: whose it is, for people. `machine`: made for one machine, so with one worker unless said."""

    about: str
    predictor: str
    residency: str
    router: str = "top-k"
    placement: str = "device"
    precision: str = "full"
    prefill: str = "ahead"
    machine: bool = True
    alpha: float | None = None
    prefetch: int | None = None

    def values(self) -> dict[str, Any]:
        """As settings; what it leaves open is not there."""
        chosen = {field.name: getattr(self, field.name) for field in fields(self)}
        kept = {name: value for name, value in chosen.items() if name not in ("about", "machine") and value is not None}
        return kept | ({"workers": 1} if self.machine else {})


SYSTEMS: dict[str, Preset] = {
    "od-moe": Preset("OD-MoE: no cache, a quantised shadow predicts", "sep", "none", machine=False),
    "sep-arc": Preset("OD-MoE's shadow, and ARC in place of no cache", "sep", "arc", machine=False),
    "random-prefetch": Preset("OD-MoE Fig. 8, case 5: any experts are prefetched", "random", "none", machine=False),
    "on-demand": Preset("loads each expert when its gate has named it", "none", "none", machine=False),
    "fully-cached": Preset("every expert stays in a slot of its own", "none", "all", machine=False),
    "importance": Preset(
        "Importance-Driven Expert Scheduling", "next-layer", "score", "expert-cache", "balance", alpha=0.3
    ),
    "smoe": Preset(
        "SMOE: Dynamic Expert Caching", "token-wise", "frequent", placement="split", prefill="pipelined", prefetch=1
    ),
    "smoe-flex": Preset(
        "SMOE-Flex: prefetches only where it pays", "token-wise-flex", "frequent", placement="split",
        prefill="pipelined", prefetch=2,
    ),
    "fate": Preset(
        "Fate: Cross-Layer Gate", "cross-layer", "shallow-arc", precision="popular", prefill="pipelined"
    ),
    "mixtral-offloading": Preset(
        "Mixtral-offloading: LRU, speculative next gate, quantised experts", "next-gate", "layer-lru", precision="int4",
        prefill="pipelined",
    ),
    "moe-infinity": Preset(
        "MoE-Infinity: request-level activation traces", "traces", "traces", prefill="pipelined"
    ),
    "eap": Preset("Expert activation path, as Fate's baseline", "path", "shallow-arc", prefill="pipelined"),
    "hobbit": Preset(
        "HOBBIT: mixed-precision loads, stacked gates", "stacked", "layer-lru", precision="mixed", prefill="pipelined"
    ),
    "adapmoe": Preset(
        "AdapMoE: skips by sensitivity, adaptive cache", "next-gate", "sensitive", "skip", prefill="pipelined"
    ),
    "hybrimoe": Preset(
        "HybriMoE: impact-driven prefetch, score-aware cache, hybrid schedule", "impact", "mrs", placement="hybrid",
        prefill="pipelined", prefetch=1,
    ),
    "static": Preset(
        "A static hot set, as KTransformers and llama.cpp place experts", "none", "static", placement="resident",
        prefill="pipelined",
    ),
}  # fmt: skip


def preset_of(name: str) -> Preset:
    """Raises ConfigError."""
    if name not in SYSTEMS:
        raise ConfigError(f"--system is {name!r}; allowed: {', '.join(SYSTEMS)}")
    return SYSTEMS[name]
