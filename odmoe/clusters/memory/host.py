"""Host memory for experts: how much a machine has, and in how many host slots of its workers it is divided."""

from __future__ import annotations

from checkpoint.store import ExpertStore
from checkpoint.tensors import round_up
from odmoe.clusters.memory.budget import memory_budget
from odmoe.clusters.memory.slots import host_room
from odmoe.settings.declarations import CUDA
from odmoe.settings.settings import Settings
from odmoe.settings.units import parse_memory
from odmoe.terminal import count_text, megabytes
from scheduler.errors import CheckpointError, ConfigError


def reserve_bytes(settings: Settings, store: ExpertStore) -> int:
    """What the nodes of this machine need beside experts, and do not hold yet. On a Ray cluster a worker has its
    machine for itself."""
    if settings.uses_existing_ray:
        return 0
    try:
        return sum(memory_budget("100%", settings, store, 0).shares.values())
    except CheckpointError:  # its configuration does not tell
        return store.manifest.expert_bytes


def asked_for_slots(settings: Settings) -> str | None:
    """The host memory that was asked for where it is the memory of the slots; None where it is not, or was not."""
    return settings.host_memory if settings.host_memory_given and settings.host_is_device else None


def host_slots(settings: Settings, store: ExpertStore, forms: tuple[str, ...], workers_here: int) -> int | None:
    """Of each of the workers on this machine, between disk and slots. None: no such tier, since the slots are host
    memory, or it has all experts, or none was asked for. Raises ConfigError where not one fits."""
    gpu = settings.loader_used == CUDA and settings.profile is None
    if settings.host_is_device:
        return None
    if settings.host_memory == "0":
        return 0 if gpu or settings.profile is not None else None
    if settings.host_memory == "auto" and not gpu:
        return None
    whole = sum(blob.length for form in forms for layer in store.layers(form).values() for blob in layer.blobs)
    if settings.host_memory == "auto":
        memory = host_room(reserve_bytes(settings, store))
    else:
        memory = parse_memory(settings.host_memory, whole)
    copies = 1 if settings.cluster == "embedded" else workers_here  # the workers of a process share one
    if gpu and memory >= whole * copies:
        return None
    each = round_up(max(map(store.manifest.form_bytes, forms)))
    experts = sum(len(layer.blobs) for layer in store.manifest.layers.values())
    found = min(experts, memory // workers_here // each)
    if found < 1 and settings.host_memory_given:
        least = each * workers_here
        raise ConfigError(
            f"--host-memory {settings.host_memory} is {megabytes(memory)} for {count_text(workers_here, 'worker')}, "
            f"and an expert of each needs {megabytes(least)}; give at least {least}, or 0 for none"
        )
    return found
