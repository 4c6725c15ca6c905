"""Systems by name: the configuration of each, and whose it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from scheduler.errors import ConfigError
from scheduler.policies.system_config import SystemConfig
from scheduler.unknown_names import unknown


@dataclass(frozen=True, slots=True)
class Preset:
    """A system that a paper describes, one to compare with, or this project's own combination."""

    about: str
    """One line for people."""
    config: SystemConfig
    single_machine: bool = True
    """Made for one machine: one worker unless more are given."""
    file: str = ""
    """The file outside of this project that it is from (`scheduler.policies.policy_file`)."""

    def values(self) -> dict[str, Any]:
        """As settings, less the numbers that it leaves to its policies."""
        chosen = {name: value for name, value in asdict(self.config).items() if value is not None}
        return chosen | ({"workers": 1} if self.single_machine else {})


SYSTEMS: dict[str, Preset] = {
    "od-moe": Preset("OD-MoE: no cache, a quantised shadow predicts", SystemConfig(), single_machine=False),
    "sep-arc": Preset("OD-MoE's shadow with an ARC cache", SystemConfig(residency="arc"), single_machine=False),
    "random-prefetch": Preset(
        "OD-MoE Fig. 8, case 5: prefetches random experts", SystemConfig("random"), single_machine=False
    ),
    "on-demand": Preset("Loads an expert once its gate has chosen it", SystemConfig("none"), single_machine=False),
    "fully-cached": Preset(
        "Every expert stays in a slot of its own", SystemConfig("none", "all"), single_machine=False
    ),
    "importance": Preset(
        "Importance-Driven Expert Scheduling",
        SystemConfig("next-layer", "score", "expert-cache", "balance", alpha=0.3),
    ),
    "smoe": Preset(
        "SMOE: Dynamic Expert Caching",
        SystemConfig("token-wise", "frequent", placement="split", prefill="pipelined", prefetch=1),
    ),
    "smoe-flex": Preset(
        "SMOE-Flex: prefetches only where it pays",
        SystemConfig("token-wise-flex", "frequent", placement="split", prefill="pipelined", prefetch=2),
    ),
    "fate": Preset(
        "Fate: Cross-Layer Gate", SystemConfig("cross-layer", "shallow-arc", precision="popular", prefill="pipelined")
    ),
    "mixtral-offloading": Preset(
        "Mixtral-offloading: LRU, next gate, quantised experts",
        SystemConfig("next-gate", "layer-lru", precision="int4", prefill="pipelined"),
    ),
    "moe-infinity": Preset(
        "MoE-Infinity: request-level activation traces", SystemConfig("traces", "traces", prefill="pipelined")
    ),
    "eap": Preset(
        "Expert activation path, with Fate's cache and forms",
        SystemConfig("path", "shallow-arc", precision="popular", prefill="pipelined"),
    ),
    "hobbit": Preset(
        "HOBBIT: mixed-precision loads and cache, stacked gates",
        SystemConfig("stacked", "multidimensional", precision="mixed", prefill="pipelined"),
    ),
    "adapmoe": Preset(
        "AdapMoE: skips by sensitivity, adaptive cache",
        SystemConfig("next-gate", "sensitive", "skip", prefill="pipelined"),
    ),
    "hybrimoe": Preset(
        "HybriMoE: impact-driven prefetch, hybrid schedule",
        SystemConfig("impact", "mrs", placement="hybrid", prefill="pipelined", prefetch=1),
    ),
    "lrfu-prefetch": Preset(
        "This project's own: next-layer prefetch, LRFU cache",
        SystemConfig("next-layer", "lrfu", placement="hybrid"),
    ),
    "ktransformers": Preset(
        "KTransformers: every routed expert on the host",
        SystemConfig("none", placement="host", prefill="pipelined"),
    ),
    "static": Preset(
        "Static hot set, as llama.cpp in Importance's comparison",
        SystemConfig("none", "static", placement="resident", prefill="pipelined"),
    ),
}


def preset_of(name: str, label: str = "--system") -> Preset:
    """`label`: how a message calls the setting. Raises ConfigError."""
    if name not in SYSTEMS:
        raise ConfigError(unknown(label, name, SYSTEMS, "odmoe systems"))
    return SYSTEMS[name]
