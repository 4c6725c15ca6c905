"""What `odmoe plan` says of the cluster that runs, for the page to show beside what is."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from odmoe.api.plan_model import model_of, read_config
from scheduler.errors import ODMoEError
from scheduler.planning.role_bytes import CPU_REST_BYTES, GPU_REST_BYTES
from scheduler.planning.scaling import Hardware, Policy, Run, Setup, Together, as_measured, memory, rates
from scheduler.planning.shadow_bytes import RECALLS
from scheduler.simulation.scenario import PROFILE
from scheduler.timing.profile import find_profile

if TYPE_CHECKING:
    from main_node.figures import NodeFigures
    from odmoe.serve.service import Service
    from odmoe.settings.settings import Settings
    from scheduler.types import ModelSize

SYSTEM = "od-moe"
"""The one that `odmoe plan` plans."""


class ClusterPlan:
    """Made when it is first asked for, in a thread: one simulation, of some tenths of a second. If that fails, the
    next to ask has it tried again: the cause may have passed."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = asyncio.Lock()
        self._made: dict[str, Any] | None = None

    async def get(self) -> dict[str, Any]:
        """`memory`: bytes by role, a worker's without its slots, and of an `expert`; empty if none can be planned.
        `tokens_per_s` of one request, `hardware`: whose times; or None, and `why` not."""
        async with self._lock:
            if self._made is not None:
                return self._made
            found = await asyncio.to_thread(self._make)
            self._made = found if found["memory"] else None
            return found

    def _make(self) -> dict[str, Any]:
        service = self._service
        opened = service.model.opened
        try:
            nodes = service.model.cluster.figures().nodes
            found = read_config(str(opened.store.path))
            aligned = service.served.has_shadow
            model = model_of(
                service.name, found.fields, found.dtype, service.context, found.experts, aligned, found.native_bits
            )
            return _plan(model, service.served, nodes)
        except ODMoEError as error:
            service.log_cause(f"the page has no plan: {error}")  # its places and names are for the log
            return _unplanned({}, "it cannot be made; the server's log has the cause")


def _unplanned(sizes: dict[str, int], why: str) -> dict[str, Any]:
    return {"memory": sizes, "tokens_per_s": None, "hardware": None, "why": why}


def _plan(model: ModelSize, served: Settings, nodes: tuple[NodeFigures, ...]) -> dict[str, Any]:
    """Raises ConfigError if the profile cannot be scaled."""
    workers = [node for node in nodes if node.role == "worker" and node.slots]
    if not workers:
        return _unplanned({}, "no worker has slots")
    shadow = served.shadow if served.has_shadow else "none"
    if shadow not in ("none", *RECALLS):
        return _unplanned({}, f"its shadows are {', '.join(RECALLS)} or none, and this one is {shadow}")
    base = find_profile(served.profile or PROFILE)
    if served.profile is not None:
        base = as_measured(base, model, shadow)
    policy = Policy(shadow, None, served.system_config, served.alignment)
    setup = Setup(model, Hardware(base, len(workers)), policy, served.kept_bytes, served.shadow_kept_bytes)
    sizes = memory(setup, 0, rest_bytes=CPU_REST_BYTES if _on_cpu(nodes, "shadow") else GPU_REST_BYTES)
    sizes = {role: sizes[role] for role in ("main", "shadow", "worker")} | {"expert": model.expert_bytes}
    why = _why_not(served, nodes)
    if why:
        return _unplanned(sizes, why)
    group = served.group_size or min(model.top_k, len(workers))
    together = Together(1, False, served.draft) if served.has_drafts else None
    (rate,) = rates(map, lambda: None, [Run(setup, group, min(one.slots for one in workers), together=together)])
    return {"memory": sizes, "tokens_per_s": round(rate, 3), "hardware": base.name, "why": ""}


def _on_cpu(nodes: tuple[NodeFigures, ...], role: str) -> bool:
    return any(node.device.startswith("cpu") for node in nodes if node.role == role)


def _why_not(served: Settings, nodes: tuple[NodeFigures, ...]) -> str:
    """Why there is no speed; empty if there is one."""
    if served.system != SYSTEM:
        return f"it plans {SYSTEM}, and this cluster runs {served.system}"
    if served.has_drafts and served.draft_from != "shadow":
        return f"it plans drafts of the shadow, and these are of the {served.draft_from}"
    if served.profile is None and _on_cpu(nodes, "worker"):
        return f"it has times of GPUs ({PROFILE}), and these workers compute on a processor"
    return ""
