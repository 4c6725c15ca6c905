"""Writes the experts' files: reads, converts and writes concurrently, in memory that is reused.

Fresh memory would cost most here: its first touch is slower than the disk.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from checkpoint import family
from checkpoint.direct_io import open_direct, write_at
from checkpoint.manifest import TENSOR_ALIGN, Blob, LayerSpec, TensorSpec, checksum, stored_name
from checkpoint.sharding.convert import Conversion, Part
from checkpoint.sharding.model_directory import cure
from checkpoint.sharding.native_experts import NativeExperts
from checkpoint.sharding.partial_store import Partial, Progress
from checkpoint.sharding.weights import buffer_bytes, finite, read
from checkpoint.tensors import aligned_buffer, round_up
from scheduler.errors import CorruptCheckpointError


def planned_layer(plan: Conversion, layer: int, native: NativeExperts) -> LayerSpec:
    """The layout of a layer's file, except for checksums and for dtypes that a family keeps wider."""
    return _spec(plan, layer, native.examples.get(layer) or plan.parameters[layer])


def full_tensors(plan: Conversion, native: NativeExperts) -> dict[int, tuple[TensorSpec, ...]]:
    """The layout of a restored expert, for each encoded layer."""
    return {layer: _spec(plan, layer, parameters).tensors for layer, parameters in native.full.items()}


def _spec(plan: Conversion, layer: int, parameters: dict[str, torch.Tensor]) -> LayerSpec:
    """The place of each parameter (of some experts, [n, ...]) in a blob, and of the blobs in the file."""
    specs, end = [], 0
    for key, value in parameters.items():
        start = round_up(end, TENSOR_ALIGN)
        specs.append(TensorSpec(key, stored_name(value.dtype), tuple(value.shape[1:]), start))
        end = start + value[0].numel() * value.element_size()
    length = round_up(end)
    blobs = tuple(Blob(expert * length, length, "") for expert in range(plan.experts(layer)))
    return LayerSpec(plan.modules[layer][0], f"layer-{layer:05d}.experts", tuple(specs), blobs)


def write_layers(plan: Conversion, partial: Partial, report: Progress, native: NativeExperts) -> None:
    """Write every missing layer: its file, synced, then its line in the journal.

    `report("experts", bytes done, of)`. Raises CheckpointError, OSError.
    """
    todo = [layer for layer in plan.layers if layer not in partial.layers]
    blob_bytes = {layer: planned_layer(plan, layer, native).blob_bytes for layer in plan.layers}
    total = sum(blob_bytes[layer] * plan.experts(layer) for layer in plan.layers)
    done = total - sum(blob_bytes[layer] * plan.experts(layer) for layer in todo)
    readers, writers = ThreadPoolExecutor(1, "odmoe-read"), ThreadPoolExecutor(1, "odmoe-write")
    with one_thread(), readers as reading, writers as writing:
        blobs, file = _Blobs(writing), None
        finished: Future[None] | None = None
        try:
            for part, tensors in _read_ahead([part for layer in todo for part in plan.parts(layer)], reading):
                report("experts", done, total)
                parameters = native.tensors(plan, part, tensors)
                if parameters is None:
                    parameters = plan.convert(part, tensors)
                    _check_finite(plan, part.layer, parameters)
                    parameters = native.stored(plan, part, parameters)
                file = file or _LayerFile(partial.store, _spec(plan, part.layer, parameters))
                for row in range(part.last - part.first):
                    blobs.write(file, part.first + row, {key: value[row] for key, value in parameters.items()})
                done += blob_bytes[part.layer] * (part.last - part.first)
                if part.last == plan.experts(part.layer):
                    if finished:
                        finished.result()
                    finished, file = writing.submit(_finish, partial, part.layer, file), None
            if finished:
                finished.result()
        finally:
            if file:
                writing.submit(os.close, file.descriptor)  # after the queued writes
    report("experts", total, total)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread, here and in threads that start meanwhile: copies gain nothing from more, and lose much
    if another process has a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _finish(partial: Partial, layer: int, file: _LayerFile) -> None:
    """Runs in the writing thread, so that the next layer is converted while this one is synced. Raises OSError."""
    try:
        blobs = tuple(
            replace(file.spec.blobs[n], checksum=checksum.result()) for n, checksum in enumerate(file.written)
        )
        os.fsync(file.descriptor)
    finally:
        os.close(file.descriptor)
    partial.add_layer(layer, replace(file.spec, blobs=blobs))


def _read_ahead(parts: list[Part], pool: ThreadPoolExecutor) -> Iterator[tuple[Part, dict[str, torch.Tensor]]]:
    """Each part with its tensors, valid until the next one, which is read meanwhile.

    Layers that cannot be divided are read one at a time: two of them would double the memory.
    """
    size = max((buffer_bytes(part.places) for part in parts), default=0)
    count = 1 if any(part.whole for part in parts) else 2
    buffers = [aligned_buffer(size) for _ in range(count)]
    coming: Future[dict[str, torch.Tensor]] | None = None
    for number, part in enumerate(parts):
        tensors = coming.result() if coming else read(part.places, buffers[0])
        if count == 2 and number + 1 < len(parts):
            coming = pool.submit(read, parts[number + 1].places, buffers[(number + 1) % 2])
        yield part, tensors


def _check_finite(plan: Conversion, layer: int, parameters: dict[str, torch.Tensor]) -> None:
    for key, value in parameters.items():
        if not finite(value):
            raise CorruptCheckpointError(
                f"{plan.source.path}: {plan.modules[layer][0]}.{key} holds NaN or infinity in "
                f"{family.dtype_name(value.dtype)}; {cure(plan.source.path)}"
            )


class _LayerFile:
    """A layer's file being written. `written` has the checksum of each expert whose write has begun."""

    def __init__(self, folder: Path, spec: LayerSpec) -> None:
        self.spec = spec
        self.written: list[Future[str]] = []
        self.descriptor = open_direct(folder / spec.file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)


class _Blobs:
    """Assembles experts in two buffers: one is filled while the other is written."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._layout: tuple[int, tuple[TensorSpec, ...]] = (0, ())
        self._free: list[tuple[torch.Tensor, Future[str] | None]] = []

    def write(self, file: _LayerFile, expert: int, parameters: dict[str, torch.Tensor]) -> None:
        """Start writing one expert. Raises an earlier expert's OSError."""
        blob = file.spec.blobs[expert]
        if self._layout != (blob.length, file.spec.tensors):
            self._layout = (blob.length, file.spec.tensors)
            self._free = [(aligned_buffer(blob.length), None) for _ in range(2)]  # zeroed, so that gaps are
        buffer, busy = self._free.pop(0)
        if busy:
            busy.result()
        for tensor in file.spec.tensors:
            value = parameters[tensor.name]
            end = tensor.offset + value.numel() * value.element_size()
            buffer[tensor.offset : end].view(value.dtype).view(value.shape).copy_(value)
        file.written.append(self._pool.submit(_write, file.descriptor, blob.offset, buffer))
        self._free.append((buffer, file.written[-1]))


def _write(descriptor: int, offset: int, buffer: torch.Tensor) -> str:
    write_at(descriptor, offset, buffer)
    return checksum(buffer.numpy().data)
