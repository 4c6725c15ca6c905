"""An expert's stay in a slot of a worker."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from scheduler.emulation.clock import Cancellation
from scheduler.types import ExpertId
from wire.messages import Compute


@dataclass(slots=True, eq=False)
class SlotOccupancy:
    """An expert's stay in a slot, from the command to load it to its eviction."""

    load_id: int
    slot: int
    expert: ExpertId
    received: float
    """When the command came, by the loader's pace; likewise `ended`."""
    form: str = ""
    host_slot: int | None = None
    """Of host memory, through which it comes."""
    ended: float = 0.0
    """End of the load."""
    occupied: bool = False
    """It holds its slot's memory."""
    loaded: bool = False
    computing: bool = False
    cancelled: Cancellation = field(default_factory=Cancellation)
    """Set by the eviction."""
    waiting: list[tuple[Compute, float]] = field(default_factory=list)
    """Computations that wait for the load, and when each came."""
    ready: deque[tuple[Compute, float]] = field(default_factory=deque)
    """Those that are queued to be computed."""

    @property
    def label(self) -> str:
        return f"{self.expert.layer}.{self.expert.expert}"
