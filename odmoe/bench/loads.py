"""How fast a worker's loaders move experts: from a disk past the page cache, and from host memory to a GPU."""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoint.manifest import Blob, LayerSpec, Manifest, TensorSpec
from checkpoint.store import ExpertStore
from checkpoint.tensors import aligned_buffer
from scheduler.errors import ConfigError, LaunchError
from worker_node.loaders.base import Loader
from worker_node.loaders.disk import DiskLoader

EXPERTS = 16
SPARE = 1 << 30
"""Bytes of the disk that are left free."""
SECONDS, LEAST = 2.0, 5
"""No load begins after so many seconds, once there are so many."""

Step = Callable[[int, int], None]
"""(done, total)"""
_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class Loads:
    """Loads of whole experts, one after the other, in random order. Rates in bytes a second."""

    expert_bytes: int
    loads: int
    bytes_per_s: float
    """The median."""
    slowest: float
    fastest: float
    past_cache: bool
    """O_DIRECT, or no file at all. Else the pages were dropped from the page cache before."""


@contextmanager
def temporary_store(folder: Path, expert_bytes: int, step: Step) -> Iterator[ExpertStore]:
    """A store of `EXPERTS` experts of noise in a new file on the disk of `folder`, none of it left in the page cache.

    The file has no name in the folder, so it goes with this process however that ends.

    Raises OSError where it cannot be written; see `check_folder`.
    """
    with tempfile.TemporaryFile(dir=folder) as stream:
        layer = LayerSpec(
            "mlp.experts",
            str(stream.fileno()),
            (TensorSpec("w", "bfloat16", (expert_bytes // 2,), 0),),
            tuple(Blob(n * expert_bytes, expert_bytes, "") for n in range(EXPERTS)),
        )
        noise = torch.randint(0, 256, (expert_bytes,), dtype=torch.uint8)
        for n in range(EXPERTS):
            stream.write(noise.roll(n).numpy().data)
            step(n + 1, EXPERTS)
        stream.flush()
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        open_files = Path(f"/proc/{os.getpid()}/fd")
        yield ExpertStore(open_files, Manifest(1, "benchmark", "none", "bfloat16", {}, {0: layer}, {}))


def check_folder(folder: Path, expert_bytes: int) -> None:
    """Raises ConfigError where the folder cannot be written to, or its disk lacks the room."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--folder is {str(folder)!r}; allowed: a directory that can be written to")
    needed, free = EXPERTS * expert_bytes + SPARE, shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"--folder {folder} has {free / 1e9:.1f} GB free, and {needed / 1e9:.1f} GB are needed; give another, or a "
            "smaller --expert-bytes"
        )


def check_disk(path: Path) -> None:
    """Raises ConfigError where a path is in memory: nothing could be said of a disk there."""
    kind = file_system(path)
    if kind in _IN_MEMORY:
        raise ConfigError(f"{path} is on a {kind}, which is memory; give --folder or --store on a disk")


def file_system(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The kind of file system that a folder is on, such as ext4; empty where the kernel does not say."""
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return ""
    real = folder.resolve()
    found = [(len(place), kind) for _, place, kind, *_ in lines if real.is_relative_to(place)]
    return max(found, key=lambda one: one[0], default=(0, ""))[1]


def measure_disk(store: ExpertStore, step: Step) -> Loads:
    """By the disk loader, into ordinary memory. Raises LaunchError where the store cannot be read."""
    for layer in store.manifest.layers.values():
        with (store.path / layer.file).open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    loader = DiskLoader(store)
    try:
        return _time_loads(loader, store, aligned_buffer(store.manifest.blob_bytes), step)
    except OSError as error:
        raise LaunchError(f"{store.path} cannot be read: {error.strerror or error}") from error
    finally:
        loader.close()


def measure_device(store: ExpertStore, step: Step) -> Loads:
    """By the CUDA loader, from page-locked host memory to the GPU. Raises ConfigError where there is none."""
    from worker_node.loaders.cuda import CudaLoader

    loader = CudaLoader(store)
    try:
        slot = torch.zeros(store.manifest.blob_bytes, dtype=torch.uint8, device=loader.device)
        loader.prepare([slot])
        return _time_loads(loader, store, slot, step)
    finally:
        loader.close()


def _time_loads(loader: Loader, store: ExpertStore, into: torch.Tensor, step: Step) -> Loads:
    experts = [(layer, n) for layer, spec in store.manifest.layers.items() for n in range(len(spec.blobs))]
    rates: list[float] = []
    began = time.monotonic()
    while len(rates) < LEAST or time.monotonic() - began < SECONDS:
        for layer, expert in random.sample(experts, len(experts)):
            start = time.perf_counter()
            moved = loader.load(layer, expert, into, lambda: False)
            rates.append(moved / max(time.perf_counter() - start, 1e-9))
            step(min(int((time.monotonic() - began) * 100), int(SECONDS * 100)), int(SECONDS * 100))
            if len(rates) >= LEAST and time.monotonic() - began >= SECONDS:
                break
    return Loads(
        expert_bytes=store.manifest.blob_bytes,
        loads=len(rates),
        bytes_per_s=statistics.median(rates),
        slowest=min(rates),
        fastest=max(rates),
        past_cache=getattr(loader, "direct", True),
    )
