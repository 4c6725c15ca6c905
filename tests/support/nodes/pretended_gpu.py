"""A GPU's streams, events and copies without a GPU: what is enqueued is done only when somebody waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from worker_node.loaders.slab import HostSlab


class Stream:
    """Work in the order in which it was enqueued."""

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []
        self.done = 0

    def wait_event(self, event: Event) -> None:
        self.work.append(event.snapshot())

    def synchronize(self) -> None:
        self.run(len(self.work))

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.work[self.done - 1]()


class Event:
    """What its stream had been given when it was recorded last."""

    def __init__(self) -> None:
        self._recorded: tuple[Stream, int] | None = None

    def record(self, stream: Stream) -> None:
        self._recorded = stream, len(stream.work)

    def snapshot(self) -> Callable[[], object]:
        assert self._recorded is not None, "an event exists from its first record on"
        stream, until = self._recorded
        return lambda: stream.run(until)

    def synchronize(self) -> None:
        self.snapshot()()


class DeviceMemory(torch.Tensor):
    """Copies to it are enqueued on the stream that is current."""

    gpu: PretendedGpu

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.copy_:
            into, source = args
            assert kwargs == {"non_blocking": True}
            cls.gpu.enqueue(into.as_subclass(torch.Tensor), source)
            return into
        return super().__torch_function__(func, types, args, kwargs or {})


class PretendedGpu:
    """In the place of torch's GPU in `worker_node.loaders.cuda`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.copies: list[int] = []
        """Bytes of each copy that was enqueued."""
        self.done = 0
        """Copies that have ended."""
        self._streams: list[Stream] = []
        self.current = self._stream()
        cuda = SimpleNamespace(
            is_available=lambda: True,
            Event=lambda blocking: Event(),
            Stream=lambda device: self._stream(),
            device=lambda device: contextlib.nullcontext(),
            stream=self._on,
            current_stream=lambda device: self.current,
            synchronize=self._synchronize,
        )
        patch.setattr("worker_node.loaders.cuda.torch", SimpleNamespace(cuda=cuda))
        patch.setattr(
            "worker_node.loaders.cuda.shared_slab", lambda store, pinned, forms: HostSlab(store, False, forms)
        )
        patch.setattr(DeviceMemory, "gpu", self, raising=False)

    def memory(self, nbytes: int, value: int) -> DeviceMemory:
        return torch.full((nbytes,), value, dtype=torch.uint8).as_subclass(DeviceMemory)

    def enqueue(self, into: torch.Tensor, source: torch.Tensor) -> None:
        def copy() -> None:
            into.copy_(source)
            self.done += 1

        self.copies.append(source.nbytes)
        self.current.work.append(copy)

    @property
    def in_flight(self) -> int:
        """Copies that were enqueued and have not ended."""
        return len(self.copies) - self.done

    def _stream(self) -> Stream:
        self._streams.append(Stream())
        return self._streams[-1]

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def _synchronize(self) -> None:
        for stream in self._streams:
            stream.synchronize()
