"""All experts in one piece of host memory: each where it should be, shared, and refused where memory lacks."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from checkpoint.store import ExpertStore
from scheduler.errors import CorruptStoreError, LaunchError
from worker_node.loaders import slab as module
from worker_node.loaders.slab import SPARE, HostSlab, available_memory, check_room, shared_slab

BlobOf = Callable[[int, int], bytes]
GIB = 1 << 30


def test_every_expert_is_there(store: ExpertStore, blob: BlobOf) -> None:
    slab = HostSlab(store, pinned=False)
    places = set()
    for layer in store.manifest.moe_layers:
        for expert in range(4):
            found = slab.blob(layer, expert)
            assert bytes(found.numpy()) == blob(layer, expert)
            assert found.untyped_storage().data_ptr() == slab.memory.untyped_storage().data_ptr()
            places |= set(range(found.data_ptr(), found.data_ptr() + found.nbytes, 4096))
    assert len(places) * 4096 == slab.memory.nbytes == store.manifest.expert_bytes


@pytest.mark.parametrize(("layer", "expert"), [(0, 4), (0, -1), (2, 0)])
def test_expert_that_does_not_exist(store: ExpertStore, layer: int, expert: int) -> None:
    with pytest.raises(CorruptStoreError, match=f"expert {expert} of layer {layer}"):
        HostSlab(store, pinned=False).blob(layer, expert)


def test_store_that_is_cut(own_store: ExpertStore) -> None:
    file, _ = own_store.locate(1, 0)
    with file.open("r+b") as stream:
        stream.truncate(4096)
    with pytest.raises(CorruptStoreError, match=file.name):
        HostSlab(own_store, pinned=False)


def test_workers_of_a_process_share_one_and_the_last_frees_it(store: ExpertStore, own_store: ExpertStore) -> None:
    first, second = shared_slab(store, pinned=False), shared_slab(ExpertStore.open(store.path), pinned=False)
    assert first is second
    assert shared_slab(own_store, pinned=False) is not first
    seen = weakref.ref(first)
    del first
    gc.collect()
    assert seen() is second
    del second
    gc.collect()
    assert seen() is None


def test_too_little_memory_says_how_much_is_missing(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    check_room(5 * GIB, 5 * GIB + SPARE, store)
    with pytest.raises(LaunchError) as caught:
        check_room(90 * GIB, 16 * GIB, store)
    said = str(caught.value)
    assert re.findall(r"[\d.]+ GiB", said) == ["90.00 GiB", "1 GiB", "16.00 GiB", "75.00 GiB"], said
    assert str(store.path) in said
    assert "--loader disk" in said
    monkeypatch.setattr(module, "available_memory", lambda: 4096)
    with pytest.raises(LaunchError, match="missing"):
        HostSlab(store, pinned=False)


def test_available_memory_is_what_the_system_says() -> None:
    """psutil reads it on its own, before and after; other processes come and go meanwhile."""
    before, found, after = psutil.virtual_memory().available, available_memory(), psutil.virtual_memory().available
    assert 0 < found < psutil.virtual_memory().total
    assert found <= max(before, after) + GIB


def system(folder: Path, available_kib: int, groups: dict[str, tuple[str, int, int]], own: str) -> tuple[Path, Path]:
    """A /proc and a /sys/fs/cgroup: group -> (limit, used, of that inactive file pages)."""
    proc, root = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable:    {available_kib} kB\n")
    (proc / "self" / "cgroup").write_text(f"0::{own}\n")
    for name, (limit, used, inactive) in groups.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "memory.max").write_text(f"{limit}\n")
        (root / name / "memory.current").write_text(f"{used}\n")
        (root / name / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\nfile 9\n")
    return proc, root


@pytest.mark.parametrize(
    ("groups", "own", "available"),
    [
        ({}, "/", 8 << 20),
        ({"a/b": ("max", 5, 0)}, "/a/b", 8 << 20),
        ({"a/b": (str(6 << 20), 2 << 20, 1 << 20)}, "/a/b", 5 << 20),
        ({"a": (str(3 << 20), 1 << 20, 0), "a/b": ("max", 1, 0)}, "/a/b", 2 << 20),
        ({"a": (str(3 << 20), 1 << 20, 0)}, "/c", 8 << 20),
        ({"a": (str(64 << 20), 1 << 20, 0)}, "/a", 8 << 20),
    ],
    ids=["no groups", "no limit", "its own limit", "a limit above it", "another's limit", "a limit beyond the machine"],
)
def test_a_container_may_have_less(
    tmp_path: Path, groups: dict[str, tuple[str, int, int]], own: str, available: int
) -> None:
    assert available_memory(*system(tmp_path, 8 << 10, groups, own)) == available


def test_a_system_that_does_not_say(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="meminfo"):
        available_memory(tmp_path, tmp_path)
