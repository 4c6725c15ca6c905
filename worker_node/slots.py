"""Device memory for experts: allocated once, counted always."""

from __future__ import annotations

import threading

import torch

from checkpoint.tensors import aligned_buffer
from scheduler.errors import ConfigError, DeadlineError, LaunchError
from scheduler.types import ExpertId


class Slots:
    """`count` buffers of `slot_bytes` each on `device`. A slot is occupied from the start of a load until its eviction.

    `resident_max`: the most slots ever occupied at once. `allocated_bytes`: what the buffers take, from the buffers.
    Raises ConfigError, or LaunchError where the device's memory does not hold them.
    """

    def __init__(self, count: int, slot_bytes: int, device: str = "cpu") -> None:
        if count < 1:
            raise ConfigError(f"slots is {count}; allowed: 1, 2, ...")
        try:
            self.buffers = [_buffer(slot_bytes, device) for _ in range(count)]
        except torch.OutOfMemoryError as error:
            raise LaunchError(f"{device} has no room for {count} slots of {slot_bytes} bytes; take fewer ({error})"
                              ) from error  # fmt: skip
        self.resident_max = 0
        self._held: list[ExpertId | None] = [None] * count
        self._changed = threading.Condition()

    @property
    def allocated_bytes(self) -> int:
        return sum(buffer.untyped_storage().nbytes() for buffer in self.buffers)

    def occupy(self, slot: int, expert: ExpertId, deadline_s: float) -> torch.Tensor:
        """Take a slot, waiting until a computation under way has left it. Raises DeadlineError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._held[slot] is None, deadline_s):
                raise DeadlineError(f"slot {slot} still holds {self._held[slot]} after {deadline_s:g} s")
            self._held[slot] = expert
            self.resident_max = max(self.resident_max, sum(held is not None for held in self._held))
            return self.buffers[slot]

    def release(self, slot: int) -> None:
        with self._changed:
            self._held[slot] = None
            self._changed.notify_all()


def _buffer(nbytes: int, device: str) -> torch.Tensor:
    if device == "cpu":
        return aligned_buffer(nbytes)
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)
