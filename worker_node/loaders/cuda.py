"""Loads onto a GPU: asynchronous copies in pieces, from page-locked memory, on a stream of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from checkpoint.store import ExpertStore
from scheduler.errors import ConfigError
from worker_node.loaders.base import Tier
from worker_node.loaders.digest import BlobDigest
from worker_node.loaders.host_tier import HostTier
from worker_node.loaders.slab import HostSlab, shared_slab
from worker_node.pace import Pace, RealPace

PIECE_BYTES = 4 << 20
"""What one copy moves. An eviction waits for `IN_FLIGHT` of them at most: 8 MiB, 0.3 ms at the 28 GB/s of PCIe 4.0 x16.
A piece takes 150 us there, several times as long as this thread needs to wake up and enqueue the next one."""

IN_FLIGHT = 2
"""Pieces enqueued at once: while one is copied, the next one is ready, so that the link never rests."""


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(blocking=True)  # a thread that waits sleeps


@dataclass(frozen=True, slots=True)
class _Marks:
    """One slot's last copy and computation."""

    loaded: torch.cuda.Event = field(default_factory=_event)
    """End of the copy, on the copying stream."""
    left: torch.cuda.Event = field(default_factory=_event)
    """End of the computation, on the stream of its thread."""


class CudaLoader:
    """Without `tier`, all experts of the store, in the `forms` that will be loaded, are in page-locked host memory from
    the start; else those that the tier keeps. A load copies one into a slot, in pieces.

    The copying stream waits for the last computation in the slot, a computation for the slot's copies; other
    slots are not affected. A load allocates nothing. A piece that was enqueued cannot be cancelled: a load that is
    given up returns when those in flight have ended, so that its slot is not used before. Raises ConfigError where
    there is no GPU, LaunchError where host memory does not suffice.
    """

    name = "cuda"

    def __init__(
        self, store: ExpertStore, device: str = "cuda", forms: tuple[str, ...] = ("",), tier: HostTier | None = None
    ) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                f"loader 'cuda' needs an NVIDIA GPU that torch can use; torch {torch.__version__} sees none here. "
                "Allowed without: disk, memory"
            )
        self.device = device
        self.pace: Pace = RealPace()
        self.tier: Tier | None = tier
        self._files = tier.disk if tier is not None else None
        self._source: HostSlab | HostTier | None = tier or shared_slab(store, True, forms)
        self._copying = torch.cuda.Stream(device)
        self._marks: dict[int, _Marks] = {}
        self._ends = [_event() for _ in range(IN_FLIGHT)]
        """Ends of the last pieces, on the copying stream."""

    def prepare(self, slots: list[torch.Tensor]) -> None:
        with torch.cuda.device(self.device):
            for slot in slots:
                marks = self._marks[slot.data_ptr()] = _Marks()
                marks.loaded.record(self._copying)  # an event exists from its first record on
                marks.left.record(torch.cuda.current_stream(self.device))
            torch.cuda.synchronize()  # the slots were filled on yet another stream

    def load(
        self,
        layer: int,
        expert: int,
        into: torch.Tensor,
        cancelled: Callable[[], bool],
        form: str = "",
        digest: BlobDigest | None = None,
    ) -> int:
        source = self._source  # kept until the copy ends: `close` must not unlock its pages
        if source is None:
            raise ConfigError("this loader was closed; make another")
        blob, digest = source.fetch(layer, expert, form, cancelled, digest)
        if blob is None:
            raise ConfigError("a GPU copies from locked pages only; make this loader's tier with pinned=True")
        marks = self._marks[into.data_ptr()]
        with torch.cuda.stream(self._copying):
            self._copying.wait_event(marks.left)
            copied = self._copy(blob, into, cancelled, digest)
            marks.loaded.record(self._copying)
        marks.loaded.synchronize()
        return copied

    def _copy(
        self, blob: torch.Tensor, into: torch.Tensor, cancelled: Callable[[], bool], digest: BlobDigest | None
    ) -> int:
        """Enqueue pieces, the next one when one of those in flight has ended. Returns the bytes of all pieces.

        The digest takes them from host memory.
        """
        for number, start in enumerate(range(0, blob.nbytes, PIECE_BYTES)):
            end = self._ends[number % IN_FLIGHT]
            if number >= IN_FLIGHT:
                end.synchronize()
            if cancelled():
                return start
            stop = min(start + PIECE_BYTES, blob.nbytes)
            into[start:stop].copy_(blob[start:stop], non_blocking=True)
            end.record(self._copying)
            if digest is not None:
                digest.add(blob[start:stop].numpy(), more=stop < blob.nbytes)
        return blob.nbytes

    @contextlib.contextmanager
    def computing(self, slot: torch.Tensor) -> Iterator[None]:
        """On the calling thread's stream: of a main node in this process that is its own, so that rows and outputs need
        no further event."""
        marks, stream = self._marks[slot.data_ptr()], torch.cuda.current_stream(self.device)
        stream.wait_event(marks.loaded)
        try:
            yield
        finally:
            marks.left.record(stream)

    def reopen(self) -> None:
        if self._files is not None:
            self._files.reopen()

    def close(self) -> None:
        """Wait for copies and computations in flight. The memory is freed with the last loader of its store."""
        torch.cuda.synchronize(self.device)
        source, self._source = self._source, None
        if isinstance(source, HostTier):
            source.close()
