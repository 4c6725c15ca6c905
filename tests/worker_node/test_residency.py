"""An evicted expert is gone from this machine's memory: no page of it stays in the page cache, as the kernel counts."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.store import ExpertStore
from support.nodes.worker_desk import WorkerDesk
from wire.messages import Evict, Load, Loaded
from worker_node.loaders.disk import DiskLoader
from worker_node.loaders.memory import MemoryLoader

PAGE = mmap.PAGESIZE


def resident(file: Path) -> list[bool]:
    """Whether each page of a file is in the page cache, by mincore(2) on a map of our own that touches none."""
    size = file.stat().st_size
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), size) as area:
        pages = (ctypes.c_ubyte * -(-size // PAGE))()
        held = ctypes.c_char.from_buffer(area)
        start = ctypes.c_void_p(ctypes.addressof(held))
        failed = ctypes.CDLL(None, use_errno=True).mincore(start, ctypes.c_size_t(size), pages)
        del held
    if failed:
        pytest.skip(f"mincore is not allowed here: {os.strerror(ctypes.get_errno())}")
    return [bool(flag & 1) for flag in pages]


def drop(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture
def file(own_store: ExpertStore) -> Path:
    """Layer 1's blobs. Here mincore is seen to tell the truth: all resident once read, none once dropped."""
    file, _ = own_store.locate(1, 0)
    file.read_bytes()
    if not all(resident(file)):
        pytest.skip("the kernel does not tell whose pages are resident (mincore says none of a file just read)")
    drop(file)
    if any(resident(file)):
        pytest.skip("this file system keeps pages that it was told to drop, as tmpfs does")
    return file


def serve_all(desk: WorkerDesk, store: ExpertStore, loader: Any) -> None:
    main = desk.welcome(desk.worker(slots=1, loader=loader))
    for expert in range(4):
        main.send(Load(expert + 1, 0, 1, expert))
        assert isinstance(main.next(), Loaded)
        main.send(Evict(0))
    assert main.usage().loads == 4


def test_loaded_past_the_page_cache_and_evicted(desk: WorkerDesk, own_store: ExpertStore, file: Path) -> None:
    loader = DiskLoader(own_store)
    serve_all(desk, own_store, loader)
    if not loader.direct:
        pytest.skip("this file system has no O_DIRECT")
    assert not any(resident(file))


def test_without_direct_reads_the_pages_are_dropped(desk: WorkerDesk, own_store: ExpertStore, file: Path) -> None:
    loader = DiskLoader(own_store)
    loader.direct = False
    serve_all(desk, own_store, loader)
    assert not any(resident(file))


def test_no_load_leaves_pages_of_its_neighbours(own_store: ExpertStore, file: Path) -> None:
    """Read-ahead goes past the end of a blob."""
    loader = DiskLoader(own_store)
    loader.direct = False
    for expert in (0, 2):
        loader.load(1, expert, torch.empty(own_store.manifest.blob_bytes, dtype=torch.uint8), lambda: False)
        assert not any(resident(file)), f"after expert {expert}"
    loader.close()


def test_the_contrast_loads_from_memory_stay(desk: WorkerDesk, own_store: ExpertStore, file: Path) -> None:
    """The memory loader keeps what it has read in host memory: what the others must not do is seen where it is done."""
    serve_all(desk, own_store, MemoryLoader(own_store))
    assert all(resident(file))
