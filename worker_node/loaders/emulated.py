"""A loader that keeps a profile's times."""

from __future__ import annotations

from scheduler.emulation.clock import Emulation
from worker_node.loaders.base import Loader
from worker_node.pace import Pace, WorkerPace


class EmulatedLoader:
    """Moves the bytes as the inner loader does, in the time of a profile: see `scheduler.emulation.clock`."""

    name = "emulated"

    def __init__(self, inner: Loader, emulation: Emulation) -> None:
        self.pace: Pace = WorkerPace(emulation)
        self.device, self.tier = inner.device, inner.tier
        self.prepare, self.load, self.reopen = inner.prepare, inner.load, inner.reopen
        self.computing, self.close = inner.computing, inner.close
