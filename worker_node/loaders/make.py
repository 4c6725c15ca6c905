"""Loaders by name."""

from __future__ import annotations

from checkpoint.store import ExpertStore
from scheduler.emulation.clock import Emulation
from scheduler.errors import ConfigError
from worker_node.loaders.base import Loader
from worker_node.loaders.disk import DiskLoader
from worker_node.loaders.emulated import EmulatedLoader
from worker_node.loaders.memory import MemoryLoader

LOADERS = ("disk", "memory", "cuda", "emulated")


def make_loader(
    name: str,
    store: ExpertStore,
    emulation: Emulation | None = None,
    moved_by: str = "disk",
    forms: tuple[str, ...] = ("",),
    device: str = "cuda",
) -> Loader:
    """`emulation`: for the loader `emulated`, whose bytes are `moved_by` another one. `forms`: all that will be loaded.
    `device`: for the loader `cuda`.

    Raises ConfigError for an unknown name, LaunchError where memory does not suffice.
    """
    if name == "disk":
        return DiskLoader(store)
    if name == "memory":
        return MemoryLoader(store)
    if name == "cuda":
        from worker_node.loaders.cuda import CudaLoader

        return CudaLoader(store, device, forms)
    if name == "emulated":
        if emulation is None:
            raise ConfigError("loader 'emulated' needs a profile for its times")
        if moved_by != "emulated":
            return EmulatedLoader(make_loader(moved_by, store, forms=forms, device=device), emulation)
        raise ConfigError("loader 'emulated' cannot move its own bytes; allowed: disk, memory, cuda")
    raise ConfigError(f"loader {name!r} is unknown; allowed: {', '.join(LOADERS)}")
