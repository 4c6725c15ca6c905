"""Loads onto a GPU. Without one, streams and copies are pretended: what is enqueued is done when it is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from checkpoint.store import ExpertStore
from checkpoint.tensors import tensor_from_bytes
from scheduler.errors import ConfigError, LaunchError
from support.nodes.pretended_gpu import PretendedGpu
from support.nodes.worker_desk import WorkerDesk
from wire.messages import Computed, Evict, Load, Loaded, WorkerReady
from worker_node.loaders.cuda import CudaLoader
from worker_node.loaders.make import make_loader
from worker_node.slots import Slots

BlobOf = Callable[[int, int], bytes]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def never() -> bool:
    return False


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(store: ExpertStore) -> None:
    with pytest.raises(ConfigError, match=r"needs an NVIDIA GPU.*disk, memory"):
        make_loader("cuda", store)


# --- in pieces, on a pretended GPU ------------------------------------------------------------------------------------

PIECE = 1000
"""Bytes; the blob's last piece is a short one."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PretendedGpu:
    monkeypatch.setattr("worker_node.loaders.cuda.PIECE_BYTES", PIECE)
    return PretendedGpu(monkeypatch)


def test_a_load_is_copied_in_pieces_of_which_two_are_in_flight(
    gpu: PretendedGpu, store: ExpertStore, blob: BlobOf
) -> None:
    loader, expected = CudaLoader(store), blob(1, 3)
    slot = gpu.memory(store.manifest.blob_bytes + 100, 0xA5)
    loader.prepare([slot])
    in_flight: list[int] = []

    def asked() -> bool:
        in_flight.append(gpu.in_flight)
        return False

    for _ in range(2):  # the second load finds the events of the first
        assert loader.load(1, 3, slot, asked) == len(expected)
        assert bytes(slot[: len(expected)].tolist()) == expected
        assert bool((slot[len(expected) :] == 0xA5).all())
        assert gpu.in_flight == 0
    pieces = [PIECE] * (len(expected) // PIECE) + [len(expected) % PIECE]
    assert pieces[-1]
    assert gpu.copies == 2 * pieces
    assert len(in_flight) == 2 * len(pieces), "asked before each piece"
    assert in_flight == 2 * [0, *[1] * (len(pieces) - 1)], "one is left while the next is enqueued"


@pytest.mark.parametrize("pieces", [0, 1, 2, 3, 5])
def test_a_load_that_is_given_up_ends_after_the_pieces_in_flight(
    gpu: PretendedGpu, store: ExpertStore, blob: BlobOf, pieces: int
) -> None:
    """Nothing is written to its slot afterwards, and the next load there is whole."""
    loader = CudaLoader(store)
    slot = gpu.memory(store.manifest.blob_bytes, 0xA5)
    loader.prepare([slot])
    assert loader.load(0, 0, slot, lambda: len(gpu.copies) >= pieces) == pieces * PIECE
    assert len(gpu.copies) == pieces
    assert gpu.in_flight == 0, "its slot may be taken now"
    assert bytes(slot[: pieces * PIECE].tolist()) == blob(0, 0)[: pieces * PIECE]
    assert bool((slot[pieces * PIECE :] == 0xA5).all())
    loader.load(1, 1, slot, never)
    assert bytes(slot.tolist()) == blob(1, 1)


def test_pieces_wait_until_the_computation_has_left_their_slot(
    gpu: PretendedGpu, store: ExpertStore, blob: BlobOf
) -> None:
    """The computation is only enqueued when the load is asked for; it still sees what was there before."""
    loader, seen = CudaLoader(store), []
    slot, other = (gpu.memory(store.manifest.blob_bytes, 0xA5) for _ in range(2))
    loader.prepare([slot, other])
    loader.load(0, 0, slot, never)
    with loader.computing(slot):
        gpu.current.work.append(lambda: seen.append(bytes(slot.tolist())))
    loader.load(0, 1, other, never)
    assert seen == [], "another slot's load does not wait for it"
    given_up = iter((False, True))
    loader.load(1, 1, slot, lambda: next(given_up))
    assert seen == [blob(0, 0)]


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@needs_gpu
def test_a_load_that_is_given_up_on_a_gpu_leaves_the_rest_of_its_slot(
    store: ExpertStore, blob: BlobOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_node.loaders.cuda.PIECE_BYTES", PIECE)
    loader, asked = make_loader("cuda", store), iter(range(100))
    slot = torch.full((store.manifest.blob_bytes,), 0xA5, dtype=torch.uint8, device="cuda")
    loader.prepare([slot])
    assert loader.load(0, 0, slot, lambda: next(asked) >= 3) == 3 * PIECE
    assert bytes(slot[: 3 * PIECE].cpu().numpy()) == blob(0, 0)[: 3 * PIECE]
    assert bool((slot[3 * PIECE :] == 0xA5).all())
    loader.load(1, 1, slot, never)
    assert bytes(slot.cpu().numpy()) == blob(1, 1)
    loader.close()


@needs_gpu
def test_exactly_the_blob(store: ExpertStore, blob: BlobOf) -> None:
    loader = make_loader("cuda", store)
    into = torch.full((store.manifest.blob_bytes + 4096,), 0xA5, dtype=torch.uint8, device="cuda")
    loader.prepare([into])
    for layer, expert in ((0, 0), (1, 3), (0, 2)):
        expected = blob(layer, expert)
        assert loader.load(layer, expert, into, never) == len(expected)
        assert bytes(into[: len(expected)].cpu().numpy()) == expected
        assert bool((into[len(expected) :] == 0xA5).all())
    assert loader.load(0, 1, into, lambda: True) == 0
    loader.close()
    loader.close()
    with pytest.raises(ConfigError, match="closed"):
        loader.load(0, 0, into, never)


@needs_gpu
def test_the_slab_is_page_locked(store: ExpertStore) -> None:
    from worker_node.loaders.slab import shared_slab

    loader = make_loader("cuda", store)
    slab = shared_slab(store, pinned=True)
    assert slab.memory.is_pinned()
    assert slab.blob(1, 3).is_pinned()
    loader.close()


@needs_gpu
def test_a_load_allocates_nothing(store: ExpertStore) -> None:
    slots = Slots(2, store.manifest.blob_bytes, "cuda")
    loader = make_loader("cuda", store)
    loader.prepare(slots.buffers)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    for number in range(50):
        slot = slots.buffers[number % 2]
        loader.load(number % 2, number % 4, slot, never)
        with loader.computing(slot):
            pass
    after = torch.cuda.memory_stats()
    for what in ("allocation.all.allocated", "segment.all.allocated", "reserved_bytes.all.current"):
        assert after[what] == before[what], what
    loader.close()


@needs_gpu
def test_a_load_waits_until_the_computation_has_left_its_slot(store: ExpertStore, blob: BlobOf) -> None:
    """The computation is only queued when the load is asked for; it must still see what was there before."""
    loader = make_loader("cuda", store)
    slot = torch.zeros(store.manifest.blob_bytes, dtype=torch.uint8, device="cuda")
    loader.prepare([slot])
    loader.load(0, 0, slot, never)
    with loader.computing(slot):
        torch.cuda._sleep(200_000_000)
        seen = slot.clone()
    loader.load(1, 1, slot, never)
    torch.cuda.synchronize()
    assert bytes(seen.cpu().numpy()) == blob(0, 0)
    assert bytes(slot.cpu().numpy()) == blob(1, 1)
    loader.close()


@needs_gpu
def test_a_worker_on_a_gpu_computes_as_the_model_there(desk: WorkerDesk, model: Any, store: ExpertStore) -> None:
    worker = desk.worker(slots=2, loader=make_loader("cuda", store))
    main = desk.connect(worker)
    main.send(desk.hello())
    ready = main.next()
    assert isinstance(ready, WorkerReady)
    assert (ready.device, ready.loader) == ("cuda", "cuda")
    assert all(buffer.is_cuda for buffer in worker.slots.buffers)
    for number in range(8):
        layer, expert, slot = number % 2, number // 2, number % 2
        asked = desk.compute(100 + number, slot, layer, expert, rows=number + 1, evict=False)
        main.send(Load(number + 1, slot, layer, expert), asked)
        answers = main.hear(2)
        assert isinstance(answers["Loaded", number + 1], Loaded)
        answer = answers["Computed", 100 + number]
        assert isinstance(answer, Computed)
        hidden, weights = (tensor_from_bytes(t.dtype, t.shape, t.data).cuda() for t in (asked.hidden, asked.weights))
        experts = model.model.layers[layer].mlp.experts.cuda()
        with torch.inference_mode():
            index = torch.full((len(hidden), 1), expert, device="cuda")
            wanted = experts(hidden, index, weights.view(-1, 1)).cpu()
        experts.cpu()
        found = tensor_from_bytes(answer.output.dtype, answer.output.shape, answer.output.data)
        assert torch.equal(found, wanted)
        main.send(Evict(slot))
    assert main.usage().resident_experts_max <= 2


@needs_gpu
def test_slots_that_the_gpu_cannot_hold_are_named() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(LaunchError, match="2 slots"):
        Slots(2, total, "cuda")
