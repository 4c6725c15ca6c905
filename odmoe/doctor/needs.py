"""What a model needs of its machines, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

from odmoe.settings.plan_settings import CONTEXT

RAY_BYTES = 830_000_000
"""Of Ray and a node's own process on a host, before any expert (docs/lan.md)."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes. `memory`: by role in the cluster file, with one expert a worker. `store`: of the disk of every machine.
    `download`: about as much more here, if the weights are not here yet. `token`: of the experts of one token, which
    are loaded if none is in memory."""

    model: str
    memory: dict[str, int]
    store: int
    download: int
    token: int
    shadow: str


def needs_of(model: str, shadow: str, workers: int, shadow_hosts: int = 1) -> Needs:
    """`shadow_hosts` share the shadow's layers. Raises ConfigError, CheckpointError."""
    from odmoe.api.plan_model import model_of, read_config
    from scheduler.planning.role_bytes import CPU_REST_BYTES
    from scheduler.planning.scaling import Hardware, Policy, Setup, memory
    from scheduler.simulation.scenario import PROFILE
    from scheduler.timing.profile import find_profile

    found = read_config(model)
    size = model_of(
        model, found.fields, found.dtype, CONTEXT, found.experts, shadow != "none", found.native_bits, dense=None
    )
    setup = Setup(size, Hardware(find_profile(PROFILE), workers), Policy(shadow))
    roles = memory(setup, slots=1, rest_bytes=CPU_REST_BYTES)
    return Needs(
        model,
        {"main_node": roles["main"], "shadow_node": roles["shadow"] // shadow_hosts, "worker_node": roles["worker"]},
        store := size.dense_bytes + size.store_bytes,
        0 if _has_weights(model) else store,
        size.layers * size.top_k * size.expert_bytes,
        shadow,
    )


def _has_weights(model: str) -> bool:
    """Whether more of it is here than its configuration."""
    from checkpoint.hub import find_model

    path = find_model(model, ["config.json"])
    return path.suffix == ".gguf" or any(path.glob("*.safetensors")) or (path / "manifest.json").is_file()
