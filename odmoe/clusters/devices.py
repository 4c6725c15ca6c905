"""The devices of a cluster's roles on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from checkpoint.devices.names import AUTO, accelerator, accelerator_memory, count, find_device
from odmoe.settings.declarations import CUDA, ROLES
from odmoe.settings.settings import Settings
from odmoe.settings.table import flag


def device_of(settings: Settings, role: str) -> torch.device:
    """The device of `main`, `shadow` or `worker` on this machine. Raises ConfigError where it has no such device.

    `auto` is a GPU for workers with the loader `cuda`, and follows the workers for other roles, whatever memory they
    need: see `odmoe.clusters.device_choice`.
    """
    name = settings.device_of(role)
    setting = flag(f"{role}_device" if getattr(settings, f"{role}_device") else "device")
    if role == "worker":
        if settings.loader_used != CUDA:
            return torch.device("cpu")
        return torch.device(CUDA, 0) if name == AUTO else find_device(name, setting)
    return _like_workers(settings) if name == AUTO else find_device(name.partition(",")[0], setting)


def shadow_devices(settings: Settings) -> list[torch.device]:
    """All that share the shadow's layers; `device_of` has the first. Raises ConfigError."""
    _, *others = settings.device_of("shadow").split(",")
    return [device_of(settings, "shadow"), *(find_device(name, flag("shadow_device")) for name in others)]


def shadow_room(settings: Settings) -> int:
    """Bytes of all memory of this machine that a part of the shadow may use. They do not depend on what is there
    already, so a process that starts again has the same part."""
    devices = shadow_devices(settings)
    if devices[0].type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return sum(accelerator_memory(device)[1] for device in devices) or 1


def _like_workers(settings: Settings) -> torch.device:
    """The workers' device, or another of its kind where this machine has fewer; else the processor."""
    found = accelerator()
    if settings.loader_used != CUDA or found is None or found.type != CUDA:
        return torch.device("cpu")
    index = int(settings.device_of("worker").partition(":")[2] or 0)
    return torch.device(CUDA, index if index < count() else 0)


def with_workers_of(settings: Settings, worker_hosts: Iterable[Mapping[str, Any]]) -> Settings:
    """The settings that `auto` of the main node and the shadow follows. `worker_hosts`: the settings of each worker's
    host in a cluster file. If all workers are on GPUs by these, so are the workers of the result."""
    of_workers = [settings.replace(**host) for host in worker_hosts]
    if of_workers and settings.loader_used != CUDA and all(one.loader_used == CUDA for one in of_workers):
        return settings.replace(worker_device=CUDA, loader=CUDA)
    return settings


def check_devices(settings: Settings) -> None:
    """Check that this machine has every device that its nodes are to use. Raises ConfigError. Of a Ray cluster that is
    joined, each node checks its own."""
    if settings.uses_existing_ray:
        return
    for role in ROLES:
        if role != "shadow":
            device_of(settings, role)
        elif settings.has_shadow:
            shadow_devices(settings)
