"""The settings of `odmoe simulate`. Settings that are not given come from the system, the recording or the profile."""

from __future__ import annotations

from typing import Any

from odmoe.settings.settings import Settings
from odmoe.settings.system_settings import SystemSettings
from odmoe.settings.table import Count, Number, again, one_of, setting
from odmoe.settings.units import DRAFTS, SPEEDS, Drafts, HostMemory, Slots, Speeds
from scheduler.limits import MAX_COUNT, MAX_EXPERTS, MAX_WORKERS
from scheduler.simulation.route_model import LIKE_TEXT, ROUTE_MODELS
from scheduler.simulation.scenario import PROFILE, RECALL
from scheduler.simulation.workload import SAME_TOKEN

MAX_REQUESTS = 1024
"""A simulation takes as long as all its tokens together."""


def _up_to(most: int, default: int | None, about: str, heading: str, common: bool = False) -> Any:
    return setting(default, f"1 to {most}", about, heading=heading, common=common, ge=1, le=most)


class SimulateSettings(SystemSettings):
    """The simulated requests. Raises ConfigError naming the setting, its value and what is allowed."""

    tokens: Count = _up_to(MAX_COUNT, 64, "Tokens to generate", "Workload", common=True)
    prompt_tokens: Count = _up_to(MAX_COUNT, 16, "Tokens of the prompt", "Workload", common=True)
    requests: Count = _up_to(MAX_REQUESTS, 1, "Requests answered at once", "Workload", common=True)
    interval: Number = setting(
        0.0, "seconds", "Seconds between arrivals of requests; 0: all at the start", heading="Workload", ge=0
    )
    parallel: Count | None = _up_to(MAX_REQUESTS, None, "Most requests answered at once (default: all)", "Workload")
    prefill_chunk: Count = again(Settings, "prefill_chunk", heading="Workload")
    batch_dense: bool = again(
        Settings, "batch_dense", heading="Workload", about="Compute several requests' dense layers together"
    )
    routes: str | None = setting(
        None, "a file", "Routes of a recording or a routing trace", heading="Workload", common=True
    )
    route_model: str | None = one_of(
        None,
        ROUTE_MODELS,
        f"Draw routes like this model's (default: {LIKE_TEXT} for caches, else uniform)",
        heading="Workload",
    )
    replay: str | None = setting(
        None, "a file", "Replay a recording, compare all decisions", heading="Workload", common=True, keyword=False
    )
    seed: Count = setting(0, "0, 1, ...", "Random seed of routes and mispredictions", heading="Workload", ge=0)

    layers: Count | None = _up_to(MAX_EXPERTS, None, "MoE layers (default: the profile's)", "Model")
    experts: Count | None = _up_to(MAX_EXPERTS, None, "Experts per layer (default: the profile's)", "Model")
    top_k: Count | None = _up_to(MAX_EXPERTS, None, "Experts per token (default: the profile's)", "Model")

    profile: str = again(Settings, "profile", default=PROFILE, heading="Cluster", common=True, about="Hardware profile")
    workers: Count | None = _up_to(
        MAX_WORKERS, None, "Workers (default: system's or profile's)", "Cluster", common=True
    )
    group_size: Count | None = again(
        Settings, "group_size", about="Workers that serve a layer together (default: --top-k, or the profile's)"
    )

    speeds: Speeds = setting(
        "",
        SPEEDS,
        "Speed of each worker's loads and computations, as 1,1,0.5 (default: all equal)",
        heading="Cluster",
    )

    replicas: Count | None = _up_to(
        MAX_WORKERS, None, "Workers that hold each expert, of a store in parts (default: all)", "Cluster"
    )

    recall: Number | None = setting(
        None,
        "a number from 0 to 1",
        f"Recall of the shadow (default: {RECALL})",
        heading="Prediction",
        common=True,
        ge=0,
        le=1,
    )
    draft: Drafts = setting(
        0,
        DRAFTS,
        "Drafts of the shadow that a block verifies; auto: chosen live",
        heading="Prediction",
    )
    acceptance: Number | None = setting(
        None,
        "a number from 0 to 1",
        f"Share of the shadow's own tokens that are the main model's (default: {SAME_TOKEN}, or the recording's)",
        heading="Prediction",
        ge=0,
        le=1,
    )
    align_token: Count = again(Settings, "align_token")
    align_kv: Count = again(Settings, "align_kv")
    align_kv_rows: str = again(Settings, "align_kv_rows")
    align_states: Count | None = again(Settings, "align_states")

    slots: Slots = again(
        Settings,
        "slots",
        about="Experts that a worker has room for; auto: 2 with --residency none (default: 1, or all that stay)",
    )
    host_memory: HostMemory | None = again(
        Settings,
        "host_memory",
        default=None,
        about="Host memory of each worker, above a disk: 25%, 2GB (default: it has all experts)",
    )
    mini_batch: Count | None = again(Settings, "mini_batch")
    trace: str | None = again(Settings, "trace")
