"""All experts of a store in one piece of host memory, from which the CUDA loader copies."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from checkpoint.store import ExpertStore
from checkpoint.tensors import aligned_buffer
from scheduler.errors import CorruptStoreError, LaunchError
from wire import runtime
from worker_node.loaders.digest import BlobDigest, Digests
from worker_node.loaders.disk import DiskLoader

SPARE = 1 << 30
"""Host memory left for everything else."""

_FOR_ALL_CONTEXTS = 1  # cudaHostRegisterPortable
_GIB = float(1 << 30)
_shared: weakref.WeakValueDictionary[tuple[Path, str, str, bool, tuple[str, ...]], HostSlab] = (
    weakref.WeakValueDictionary()
)
_sharing = runtime.Lock()


class HostSlab:
    """All experts that the store holds, in each of `forms`, read and checked at construction.

    `pinned`: page-locked, so that a GPU can copy from it.

    Pages are locked after they were mapped, since torch's own pinned allocator rounds up to a power of two. Raises
    LaunchError where memory does not suffice, OSError or CorruptStoreError where the store cannot be read.
    """

    def __init__(self, store: ExpertStore, pinned: bool, forms: tuple[str, ...] = ("",)) -> None:
        total = sum(blob.length for form in forms for _, blob in store.experts(form))
        check_room(total, available_memory(), store)
        self.memory = aligned_buffer(total)
        self._blobs: dict[tuple[int, int, str], torch.Tensor] = {}
        self._read(store, forms)
        self.pinned = pinned
        if pinned:
            lock_pages(self.memory)
            unlock = weakref.finalize(self, unlock_pages, self.memory.data_ptr())
            unlock.atexit = False  # by then the driver may be gone, and the memory goes anyway

    def fetch(
        self, layer: int, expert: int, form: str, cancelled: Callable[[], bool], digest: BlobDigest | None
    ) -> tuple[torch.Tensor, BlobDigest | None]:
        """As `HostTier.fetch`: everything is here."""
        return self.blob(layer, expert, form), digest

    def blob(self, layer: int, expert: int, form: str = "") -> torch.Tensor:
        """An expert's bytes, uint8. Raises CorruptStoreError for an expert that the store did not have."""
        blob = self._blobs.get((layer, expert, form))
        if blob is None:
            in_form = f" in form {form}" if form else ""
            raise CorruptStoreError(f"no expert {expert} of layer {layer}{in_form} was in the store when it was read")
        return blob

    def _read(self, store: ExpertStore, forms: tuple[str, ...]) -> None:
        loader, digests, start = DiskLoader(store), Digests("slab-check"), 0
        every = ((form, *one) for form in forms for one in store.experts(form))
        try:
            for form, (layer, expert), blob in every:
                place = self.memory[start : start + blob.length]
                digest = digests.new()
                loader.load(layer, expert, place, lambda: False, form, digest)
                if digest.hex() != blob.checksum:
                    raise CorruptStoreError(
                        f"expert {expert} of layer {layer} in {store.locate(layer, expert, form)[0]} fails its "
                        "checksum; make the store again"
                    )
                self._blobs[layer, expert, form] = place
                start += blob.length
        finally:
            loader.close()
            digests.close()


def shared_slab(store: ExpertStore, pinned: bool, forms: tuple[str, ...] = ("",)) -> HostSlab:
    """The slab of this store, one for all workers of a process. It is freed with its last user."""
    key = store.path.resolve(), store.manifest.fingerprint, store.manifest.dtype, pinned, forms
    with _sharing:
        slab = _shared.get(key)
        if slab is None:
            slab = _shared[key] = HostSlab(store, pinned, forms)
        return slab


def check_room(needed: int, available: int, store: ExpertStore) -> None:
    """Raises LaunchError with the memory that is missing."""
    missing = needed + SPARE - available
    if missing > 0:
        raise LaunchError(
            f"loader cuda keeps all experts of {store.path} in host memory: {needed / _GIB:.2f} GiB and "
            f"{SPARE / _GIB:.0f} GiB to spare; {available / _GIB:.2f} GiB are available, {missing / _GIB:.2f} GiB are "
            "missing. Give this node more memory, or take --loader disk"
        )


def available_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes available without swapping: of the machine, or of this process's control group if that has fewer.

    Raises LaunchError where the kernel does not report them.
    """
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError) as error:
        raise LaunchError(f"{proc / 'meminfo'} does not say how much memory is available: {error!r}") from error
    return min([available, *_group_rooms(proc, groups)])


def _group_rooms(proc: Path, groups: Path) -> list[int]:
    """Free bytes of each control group (v2) of this process that has a limit."""
    try:
        paths = [line.split(":", 2)[2] for line in (proc / "self" / "cgroup").read_text().splitlines()]
    except (OSError, IndexError):
        return []
    rooms = []
    for path in paths:
        inner = groups / path.strip("/")
        for folder in [inner, *inner.parents][: len(Path(path).parts)]:
            try:
                limit, used = (folder / "memory.max").read_text(), (folder / "memory.current").read_text()
                stats = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                rooms.append(int(limit) - int(used) + int(stats["inactive_file"]))
            except (OSError, ValueError, KeyError):  # "max", or not a v2 group
                continue
    return rooms


def lock_pages(memory: torch.Tensor) -> None:
    """So that a GPU can copy from them. Raises LaunchError."""
    try:
        runtime: Any = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _FOR_ALL_CONTEXTS))
        if code:
            raise torch.cuda.CudaError(code)
    except RuntimeError as error:
        raise LaunchError(
            f"{memory.nbytes / _GIB:.2f} GiB of host memory could not be page-locked ({error}); "
            "check `ulimit -l`, or take --loader disk"
        ) from error


def unlock_pages(pointer: int) -> None:
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(pointer)
