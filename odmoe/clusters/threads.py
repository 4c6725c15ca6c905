"""How many threads torch computes with in this process, which all models on embedded clusters have in common."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from scheduler.errors import ConfigError

if TYPE_CHECKING:
    from checkpoint.store import ExpertStore
    from odmoe.settings.settings import Settings

SMALL_EXPERT_BYTES = 2 << 20
"""A restored expert up to this is computed as fast by one thread, and on a busy machine ten times as fast: several
threads wait for the slowest of them in each product."""


class SharedThreads:
    """The number that open models compute with. The last bits of sums depend on it, so it stays while one is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._count = self._before = 0

    @property
    def is_held(self) -> bool:
        """Whether a model is open, which keeps its number."""
        with self._lock:
            return self._open > 0

    @contextlib.contextmanager
    def hold(self, given: int | None, usual: int) -> Iterator[int]:
        """The number to compute with, for as long as the block lasts; then torch has as many again as before the first
        of them. `given`: the number that was asked for. `usual`: where none was, and no model is open.

        Raises ConfigError for another number than that of a model that is open.
        """
        import torch

        with self._lock:
            if not self._open:
                self._count, self._before = given or usual, torch.get_num_threads()
            elif given not in (None, self._count):
                raise ConfigError(
                    f"--threads is {given}, and a model that is open in this process computes with {self._count}, "
                    f"which is torch's number for the whole process; allowed: {self._count} (or leave it out), another "
                    "process, or close that model first"
                )
            self._open += 1
        try:
            yield self._count
        finally:
            with self._lock:
                self._open -= 1
                if not self._open:
                    torch.set_num_threads(self._before)


SHARED_THREADS = SharedThreads()


def with_threads(settings: Settings, store: ExpertStore) -> Settings:
    """The settings with one thread for each node of this process where none is given and experts are small. Emulated
    nodes keep what they have, and so do those of a process that has chosen a number of threads already."""
    chosen = settings.threads is not None or settings.profile is not None or SHARED_THREADS.is_held
    if chosen or settings.cluster != "embedded" or store.manifest.restored_bytes > SMALL_EXPERT_BYTES:
        return settings
    return settings if settings.threads_a_node == 1 else settings.replace(threads=1)
