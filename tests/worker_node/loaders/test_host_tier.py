"""Host memory between disk and slots: what is there comes without the disk, what is not is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoint.store import ExpertStore
from checkpoint.tensors import aligned_buffer, round_up
from scheduler.types import ExpertId
from support.nodes.pretended_gpu import PretendedGpu
from wire import runtime
from worker_node.loaders import host_tier
from worker_node.loaders.cuda import CudaLoader
from worker_node.loaders.host_tier import LEAST_SPARE, HostTier
from worker_node.loaders.tiered import TieredLoader
from worker_node.memory_watch import MemoryWatch

BlobOf = Callable[[int, int], bytes]
PLENTY = 1 << 40


def never() -> bool:
    return False


@pytest.fixture(autouse=True)
def one_slot_an_area(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "AREA_BYTES", 1)


def damage(store: ExpertStore, layer: int, expert: int) -> None:
    """Whoever reads it from disk sees other bytes."""
    file, blob = store.locate(layer, expert)
    with Path(file).open("r+b") as out:
        out.seek(blob.offset)
        out.write(bytes(blob.length))


def load(loader: TieredLoader, into: torch.Tensor, layer: int, expert: int) -> bytes:
    moved = loader.load(layer, expert, into, never)
    return bytes(into[:moved].tolist())


def test_what_is_there_is_not_read_again_and_what_left_is(own_store: ExpertStore, blob: BlobOf) -> None:
    tier = HostTier(own_store, 2, available=lambda: PLENTY)
    loader, into = TieredLoader(own_store, tier), aligned_buffer(own_store.manifest.blob_bytes)
    assert not tier.assign(0, ExpertId(0, 1), "")
    assert load(loader, into, 0, 1) == blob(0, 1)
    damage(own_store, 0, 1)
    assert tier.assign(0, ExpertId(0, 1), "")
    assert load(loader, into, 0, 1) == blob(0, 1), "from host memory"
    assert not tier.assign(0, ExpertId(1, 2), ""), "another takes its place"
    assert load(loader, into, 1, 2) == blob(1, 2)
    assert not tier.assign(1, ExpertId(0, 1), "")
    assert load(loader, into, 0, 1) == bytes(len(blob(0, 1))), "from disk"
    assert tier.bytes_max == 2 * round_up(own_store.manifest.blob_bytes) == tier.allocated_bytes
    loader.close()
    assert tier.allocated_bytes == 0


def test_a_read_that_was_given_up_leaves_nothing_that_counts_as_the_expert(store: ExpertStore, blob: BlobOf) -> None:
    tier = HostTier(store, 1, available=lambda: PLENTY)
    tier.disk.piece_bytes = 4096
    loader, into = TieredLoader(store, tier), aligned_buffer(store.manifest.blob_bytes)
    tier.assign(0, ExpertId(0, 0), "")
    asked = iter((False, True, True, True))
    assert loader.load(0, 0, into, lambda: next(asked)) == 0
    assert not tier.assign(0, ExpertId(0, 0), "")
    assert load(loader, into, 0, 0) == blob(0, 0)
    tier.drop(ExpertId(0, 0))
    assert not tier.assign(0, ExpertId(0, 0), ""), "a failed load or check is not trusted"
    load(loader, into, 0, 0)
    tier.assign(None, ExpertId(0, 0), "")
    assert not tier.assign(0, ExpertId(0, 0), ""), "nor what a load was told to go around"


def test_without_a_slot_a_load_goes_straight_to_where_it_is_needed(store: ExpertStore, blob: BlobOf) -> None:
    tier = HostTier(store, 1, available=lambda: PLENTY)
    loader, into = TieredLoader(store, tier), aligned_buffer(store.manifest.blob_bytes)
    assert not tier.assign(None, ExpertId(0, 3), "")
    assert load(loader, into, 0, 3) == blob(0, 3)
    assert tier.bytes_max == 0


def test_memory_that_runs_short_is_given_back_and_the_main_node_is_told(
    store: ExpertStore, blob: BlobOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many areas as it takes until there is enough to spare."""
    slot, told = round_up(store.manifest.blob_bytes), list[int]()
    monkeypatch.setattr(host_tier, "LEAST_SPARE", 9 * slot)
    monkeypatch.setattr(host_tier, "SPARE", 10 * slot)
    left = [PLENTY]
    tier = HostTier(store, 4, available=lambda: left[0])
    loader, into = TieredLoader(store, tier), aligned_buffer(store.manifest.blob_bytes)
    watch = MemoryWatch("w", tier, runtime.Lock(), told.append)
    for expert in range(3):
        tier.assign(expert, ExpertId(0, expert), "")
        load(loader, into, 0, expert)
    left[0] = 9 * slot
    watch.look()
    assert (tier.slots, told) == (4, []), "enough is left"
    left[0] -= 1
    watch.look()
    watch.close()
    assert (tier.slots, told, tier.allocated_bytes) == (1, [1], slot)
    assert not tier.assign(3, ExpertId(0, 3), ""), "a command from before goes without host memory"
    assert load(loader, into, 0, 3) == blob(0, 3)
    assert tier.assign(0, ExpertId(0, 0), "")
    assert load(loader, into, 0, 0) == blob(0, 0)


def test_no_area_is_taken_that_the_machine_has_no_memory_for(store: ExpertStore, blob: BlobOf) -> None:
    slot, told = round_up(store.manifest.blob_bytes), list[int]()
    left = [LEAST_SPARE + slot]
    tier = HostTier(store, 4, available=lambda: left[0])
    loader, into = TieredLoader(store, tier), aligned_buffer(store.manifest.blob_bytes)
    watch = MemoryWatch("w", tier, runtime.Lock(), told.append)
    tier.assign(0, ExpertId(0, 0), "")
    load(loader, into, 0, 0)
    left[0] -= 1
    tier.assign(1, ExpertId(0, 1), "")
    assert load(loader, into, 0, 1) == blob(0, 1)
    watch.look()
    watch.close()
    assert (tier.slots, told, tier.bytes_max) == (1, [1], slot)
    assert tier.assign(0, ExpertId(0, 0), ""), "what was there stays"


def test_a_gpu_copies_from_locked_pages_only(store: ExpertStore, blob: BlobOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a pretended GPU. What may not stay goes through locked pages, too."""
    locked: list[int] = []
    monkeypatch.setattr(host_tier, "lock_pages", lambda memory: locked.append(memory.data_ptr()))
    monkeypatch.setattr(host_tier, "unlock_pages", locked.remove)
    gpu = PretendedGpu(monkeypatch)
    tier = HostTier(store, 2, pinned=True, available=lambda: PLENTY)
    loader, slot = CudaLoader(store, tier=tier), gpu.memory(store.manifest.blob_bytes, 0xA5)
    loader.prepare([slot])
    for host_slot, expert, there in ((0, 0, False), (0, 0, True), (1, 1, False), (None, 2, False), (0, 0, True)):
        assert tier.assign(host_slot, ExpertId(1, expert), "") is there
        assert loader.load(1, expert, slot, never) == len(blob(1, expert))
        assert bytes(slot.tolist()) == blob(1, expert)
    assert len(locked) == 3, "two slots, and one for what passes"
    tier.close()
    assert locked == []
