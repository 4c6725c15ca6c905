"""Device memory for experts: allocated once, and counted."""

from __future__ import annotations

import threading

import torch

from checkpoint.tensors import aligned_buffer
from scheduler.errors import ConfigError, DeadlineError, LaunchError
from scheduler.types import ExpertId


class Slots:
    """`count` buffers of `slot_bytes` each on `device`. A slot is occupied from the start of a load until its eviction.

    Raises ConfigError, or LaunchError where the device has no room for them.
    """

    def __init__(self, count: int, slot_bytes: int, device: str = "cpu") -> None:
        if count < 1:
            raise ConfigError(f"slots is {count}; allowed: 1, 2, ...")
        try:
            self.buffers = [_buffer(slot_bytes, device) for _ in range(count)]
        except torch.OutOfMemoryError as error:
            raise LaunchError(
                f"{device} has no room for {count} slots of {slot_bytes} bytes; take fewer ({error})"
            ) from error
        self.resident_max = 0
        """The most slots ever occupied at once."""
        self._content: list[ExpertId | None] = [None] * count
        self._occupied = [0] * count
        """How often each slot was occupied."""
        self._changed = threading.Condition()

    @property
    def allocated_bytes(self) -> int:
        """Measured from the buffers."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self.buffers)

    def occupy(self, slot: int, expert: ExpertId, deadline_s: float) -> torch.Tensor:
        """Take a slot once the computation in it has left. Raises DeadlineError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._content[slot] is None, deadline_s):
                raise DeadlineError(f"slot {slot} still holds {self._content[slot]} after {deadline_s:g} s")
            self._content[slot] = expert
            self._occupied[slot] += 1
            self.resident_max = max(self.resident_max, sum(expert is not None for expert in self._content))
            return self.buffers[slot]

    def tenure(self, slot: int) -> tuple[int, int] | None:
        """The slot, and how often it was occupied: the same as long as an expert stays in it. None before the first."""
        return (slot, self._occupied[slot]) if self._occupied[slot] else None

    def release(self, slot: int) -> None:
        with self._changed:
            self._content[slot] = None
            self._changed.notify_all()


def _buffer(nbytes: int, device: str) -> torch.Tensor:
    if device == "cpu":
        return aligned_buffer(nbytes)
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)
