"""Loaders by name."""

from __future__ import annotations

from checkpoint.store import ExpertStore
from scheduler.emulation.clock import Emulation
from scheduler.errors import ConfigError
from worker_node.loaders.base import Loader
from worker_node.loaders.disk import DiskLoader
from worker_node.loaders.emulated import EmulatedLoader
from worker_node.loaders.host_tier import HostTier
from worker_node.loaders.memory import MemoryLoader
from worker_node.loaders.tiered import TieredLoader

LOADERS = ("disk", "memory", "cuda", "emulated")


def make_loader(
    name: str,
    store: ExpertStore,
    emulation: Emulation | None = None,
    moved_by: str = "disk",
    forms: tuple[str, ...] = ("",),
    device: str = "cuda",
    host_slots: int | None = None,
) -> Loader:
    """`emulation`: for the loader `emulated`, whose bytes are `moved_by` another one. `forms`: all that will be loaded.
    `device`: for the loader `cuda`. `host_slots`: of a tier between disk and slots, for the loaders `disk` and `cuda`;
    None: without a tier.

    Raises ConfigError for an unknown name, LaunchError where memory does not suffice.
    """
    if name == "disk":
        return DiskLoader(store) if host_slots is None else TieredLoader(store, HostTier(store, host_slots, forms))
    if name == "memory":
        return MemoryLoader(store)
    if name == "cuda":
        from worker_node.loaders.cuda import CudaLoader

        tier = None if host_slots is None else HostTier(store, host_slots, forms, pinned=True)
        return CudaLoader(store, device, forms, tier)
    if name == "emulated":
        if emulation is None:
            raise ConfigError("loader 'emulated' needs a profile for its times")
        if moved_by != "emulated":
            inner = make_loader(moved_by, store, forms=forms, device=device, host_slots=host_slots)
            return EmulatedLoader(inner, emulation)
        raise ConfigError("loader 'emulated' cannot move its own bytes; allowed: disk, memory, cuda")
    raise ConfigError(f"loader {name!r} is unknown; allowed: {', '.join(LOADERS)}")
