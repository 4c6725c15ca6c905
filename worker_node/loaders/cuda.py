"""Loads onto a GPU: one asynchronous copy per expert, from page-locked memory, on its own stream."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from checkpoint.store import ExpertStore
from scheduler.errors import ConfigError
from worker_node.loaders.slab import HostSlab, shared_slab
from worker_node.pace import Pace, RealPace


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(blocking=True)  # a thread that waits sleeps


@dataclass(frozen=True, slots=True)
class _Marks:
    """One slot's last copy and computation."""

    loaded: torch.cuda.Event = field(default_factory=_event)
    """End of the copy, on the copying stream."""
    left: torch.cuda.Event = field(default_factory=_event)
    """End of the computation, on the computing stream."""


class CudaLoader:
    """All experts of the store, in the `forms` that will be loaded, are in page-locked host memory from the start. A
    load is one copy into a slot.

    The copying stream waits for the last computation in the slot, the computing stream for the slot's copy; other slots
    are not affected. A load allocates nothing. A copy in flight cannot be cancelled: it ends, and is ignored. Raises
    ConfigError where there is no GPU, LaunchError where host memory does not suffice.
    """

    name = "cuda"

    def __init__(self, store: ExpertStore, device: str = "cuda", forms: tuple[str, ...] = ("",)) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                f"loader 'cuda' needs an NVIDIA GPU that torch can use; torch {torch.__version__} sees none here. "
                "Allowed without: disk, memory"
            )
        self.device = device
        self.pace: Pace = RealPace()
        self._slab: HostSlab | None = shared_slab(store, True, forms)
        self._copying, self._computing = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._marks: dict[int, _Marks] = {}

    def prepare(self, slots: list[torch.Tensor]) -> None:
        with torch.cuda.device(self.device):
            for slot in slots:
                marks = self._marks[slot.data_ptr()] = _Marks()
                marks.loaded.record(self._copying)  # an event exists from its first record on
                marks.left.record(self._computing)
            torch.cuda.synchronize()  # the slots were filled on yet another stream

    def load(self, layer: int, expert: int, into: torch.Tensor, cancelled: Callable[[], bool], form: str = "") -> int:
        slab = self._slab  # kept until the copy ends: `close` must not unlock its pages
        if slab is None:
            raise ConfigError("this loader was closed; make another")
        blob = slab.blob(layer, expert, form)
        if cancelled():
            return 0
        marks = self._marks[into.data_ptr()]
        with torch.cuda.stream(self._copying):
            self._copying.wait_event(marks.left)
            into[: blob.nbytes].copy_(blob, non_blocking=True)
            marks.loaded.record(self._copying)
        marks.loaded.synchronize()
        return blob.nbytes

    @contextlib.contextmanager
    def computing(self, slot: torch.Tensor) -> Iterator[None]:
        marks = self._marks[slot.data_ptr()]
        with torch.cuda.stream(self._computing):
            self._computing.wait_event(marks.loaded)
            try:
                yield
            finally:
                marks.left.record(self._computing)

    def close(self) -> None:
        """Wait for copies and computations in flight. The memory is freed with the last loader of its store."""
        self._copying.synchronize()
        self._computing.synchronize()
        self._slab = None
