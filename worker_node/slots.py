"""Device memory for experts: allocated once, and counted."""

from __future__ import annotations

import torch

from checkpoint.tensors import aligned_buffer, round_up
from scheduler.errors import ConfigError, DeadlineError, LaunchError
from scheduler.types import ExpertId
from wire import runtime


class Slots:
    """`count` buffers of `slot_bytes` each on `device`. A slot is occupied from the start of a load until its eviction.

    Raises ConfigError, or LaunchError where the device has no room for them.
    """

    def __init__(self, count: int, slot_bytes: int, device: str = "cpu") -> None:
        if count < 1:
            raise ConfigError(f"slots is {count}; allowed: 1, 2, ...")
        try:
            self._area = _area(count * round_up(slot_bytes), device)
        except (torch.OutOfMemoryError, OSError) as error:  # of a device; of the kernel
            raise LaunchError(
                f"{device} has no room for {count} slots of {slot_bytes} bytes; take fewer ({error})"
            ) from error
        self.buffers = [piece[:slot_bytes] for piece in self._area.split(round_up(slot_bytes))]
        self.resident_max = 0
        """The most slots ever occupied at once."""
        self._content: list[ExpertId | None] = [None] * count
        self._occupied = [0] * count
        """How often each slot was occupied."""
        self._changed = runtime.Condition()

    @property
    def allocated_bytes(self) -> int:
        """Measured from the memory that they share."""
        return self._area.untyped_storage().nbytes()

    def occupy(self, slot: int, expert: ExpertId, deadline_s: float) -> torch.Tensor:
        """Take a slot once the computation in it has left. Raises DeadlineError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._content[slot] is None, deadline_s):
                raise DeadlineError(f"slot {slot} still holds {self._content[slot]} after {deadline_s:g} s")
            self._content[slot] = expert
            self._occupied[slot] += 1
            self.resident_max = max(self.resident_max, sum(expert is not None for expert in self._content))
            return self.buffers[slot]

    def occupancy(self, slot: int) -> tuple[int, int] | None:
        """The slot, and how often it was occupied: the same as long as an expert stays in it. None before the first."""
        return (slot, self._occupied[slot]) if self._occupied[slot] else None

    def release(self, slot: int) -> None:
        with self._changed:
            self._content[slot] = None
            self._changed.notify_all()


def _area(nbytes: int, device: str) -> torch.Tensor:
    """Of all slots together. In pieces, those below 2 MiB have no huge pages: once a process has run for long, their
    pages lie scattered, and the disk needs twice as long to fill them."""
    if device == "cpu":
        return aligned_buffer(nbytes)
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)
