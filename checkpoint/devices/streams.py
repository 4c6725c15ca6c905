"""Streams of an accelerator, where it has them: work that need not wait for other work of the same device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from checkpoint.devices.transfer import pack, pins, unpack

_WITH_STREAMS = ("cuda",)


def new_stream(device: torch.device) -> torch.Stream | None:
    """A stream beside the default one. None for the processor, and where only the default one is used."""
    return torch.Stream(device) if device.type in _WITH_STREAMS else None


def on_stream(stream: torch.Stream | None) -> AbstractContextManager[object]:
    """The calling thread's work for the device goes to `stream`."""
    return contextlib.nullcontext() if stream is None else stream


@contextlib.contextmanager
def on_streams(streams: Sequence[torch.Stream]) -> Iterator[None]:
    """As `on_stream`, for streams of several devices, of which the first's is the current one."""
    with contextlib.ExitStack() as stack:
        for stream in reversed(streams):
            stack.enter_context(on_stream(stream))
        yield


def borrow(tensors: Sequence[torch.Tensor]) -> None:
    """The calling thread's stream may read tensors that their device's default stream makes, and their memory is not
    used again before it has. Nothing where tensors are on the host."""
    for device in {tensor.device for tensor in tensors if tensor.device.type in _WITH_STREAMS}:
        stream = torch.accelerator.current_stream(device)
        stream.wait_stream(torch.cuda.default_stream(device))
        for tensor in tensors:
            if tensor.device == device:
                tensor.record_stream(stream)


@dataclass(frozen=True, slots=True)
class Landing:
    """Tensors on their way to page-locked host memory."""

    tensors: list[torch.Tensor]
    """On the host. Their values are there after `wait`."""
    ended: torch.Event | None

    def wait(self) -> list[torch.Tensor]:
        if self.ended is not None:
            self.ended.synchronize()
        return self.tensors


class HostCopies:
    """Copies to the host on a stream of their own, which delay neither the model nor the thread that begins them."""

    def __init__(self, device: torch.device) -> None:
        self._stream = new_stream(device)

    def begin(self, tensors: Sequence[torch.Tensor]) -> Landing:
        """Enqueue a copy of the tensors as they are at this point of the calling thread's stream."""
        device = tensors[0].device
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(device))
        with on_stream(self._stream):
            packed, places = pack(tensors)
            landed = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=pins(device))
            landed.copy_(packed, non_blocking=self._stream is not None)
            ended = None if self._stream is None else self._stream.record_event()
        if self._stream is not None:
            for tensor in tensors:
                tensor.record_stream(self._stream)
        return Landing(unpack(landed, tensors, places), ended)
