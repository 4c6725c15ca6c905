"""A worker's loader is measured before it serves: through that very loader, and leaving no trace."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch

from checkpoint.store import ExpertStore
from scheduler.emulation.clock import Emulation
from scheduler.errors import CorruptStoreError, LaunchError
from scheduler.timing.profile import find_profile
from support.nodes.stepping_clock import SteppingClock
from support.nodes.worker_desk import Expected, WorkerDesk
from wire.messages import WorkerUsage
from worker_node import measure
from worker_node.loaders.base import HostLoader
from worker_node.loaders.digest import BlobDigest
from worker_node.loaders.disk import DiskLoader
from worker_node.loaders.emulated import EmulatedLoader
from worker_node.loaders.make import make_loader
from worker_node.loaders.memory import MemoryLoader
from worker_node.measure import load_bandwidth, restoring_seconds
from worker_node.pace import RealPace

PROFILE = find_profile("rtx3090-1gbe")


@dataclass
class Clock(RealPace):
    """Each load lasts what is said of it."""

    seconds: list[float]
    at: float = 100.0

    def begin_load(self, at: float) -> float:
        return self.at

    def end_load(self, cancelled: threading.Event, share: float = 1.0, in_memory: bool = True) -> float:
        self.at += self.seconds.pop(0)
        return self.at


@dataclass
class Scripted:
    """A loader that says how many bytes it has moved, and writes down what into."""

    pace: Clock
    moves: int = 1000
    name: str = "scripted"
    device: str = "cpu"
    tier: None = None
    asked: list[tuple[int, int, int]] = field(default_factory=list)

    def load(
        self,
        layer: int,
        expert: int,
        into: torch.Tensor,
        cancelled: Callable[[], bool],
        form: str = "",
        digest: BlobDigest | None = None,
    ) -> int:
        self.asked.append((layer, expert, into.data_ptr()))
        return self.moves

    def prepare(self, slots: list[torch.Tensor]) -> None: ...

    def close(self) -> None: ...


def slots(store: ExpertStore, count: int) -> list[torch.Tensor]:
    return [torch.zeros(store.manifest.blob_bytes, dtype=torch.uint8) for _ in range(count)]


def test_the_median_of_different_experts_in_every_slot(store: ExpertStore) -> None:
    loader, buffers = Scripted(Clock([0.001, 0.004, 0.002, 0.1, 0.005])), slots(store, 3)
    assert load_bandwidth(store, loader, buffers) == pytest.approx(1000 / 0.004)
    experts = [(layer, expert) for layer, expert, _ in loader.asked]
    assert len(set(experts)) == len(experts) == 5
    assert {at for _, _, at in loader.asked} == {buffer.data_ptr() for buffer in buffers}


@pytest.mark.parametrize(("moves", "loads"), [(40 << 20, 2), (700 << 20, 1)])
def test_large_experts_are_not_loaded_more_often_than_need_be(store: ExpertStore, moves: int, loads: int) -> None:
    loader = Scripted(Clock([0.5] * 5), moves)
    assert load_bandwidth(store, loader, slots(store, 1)) == pytest.approx(moves / 0.5)
    assert len(loader.asked) == loads


@pytest.mark.parametrize("name", ["disk", "memory"])
def test_a_real_loader(store: ExpertStore, blob: Callable[[int, int], bytes], name: str) -> None:
    buffers = slots(store, 5)
    loader = make_loader(name, store)
    assert load_bandwidth(store, loader, buffers) > 0
    loader.close()
    every = [blob(layer, expert) for layer in (0, 1) for expert in range(4)]
    assert all(bytes(buffer.numpy()) in every for buffer in buffers), "a measured load is a load"


def test_nothing_of_it_is_counted_or_left(desk: WorkerDesk, store: ExpertStore, expected: Expected) -> None:
    worker = desk.worker(slots=2, loader=DiskLoader(store))
    main = desk.welcome(worker)
    assert worker.load_bytes_per_s > 0
    assert main.usage() == WorkerUsage(0, 2 * store.manifest.blob_bytes, 0, 0)
    main.loads_and_computes(1, desk.compute(2, 0, 1, 3), expected)
    assert main.usage() == WorkerUsage(1, 2 * store.manifest.blob_bytes, 1, store.manifest.blob_bytes, 1)


def test_an_emulated_loader_gives_what_its_profile_says(
    desk: WorkerDesk, store: ExpertStore, stepping_clock: SteppingClock
) -> None:
    emulation = Emulation(replace(PROFILE, load_s=0.05), stepping_clock)
    worker = desk.worker(loader=EmulatedLoader(MemoryLoader(store), emulation))
    assert worker.load_bytes_per_s == pytest.approx(store.manifest.blob_bytes / 0.05)


def test_a_load_that_does_not_end_is_not_waited_for(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "GIVE_UP_S", 0.05)
    hour = EmulatedLoader(MemoryLoader(store), Emulation(replace(PROFILE, load_s=3600.0)))
    assert load_bandwidth(store, hour, slots(store, 1)) == 0


def test_what_a_slow_load_has_moved_until_it_was_given_up_counts(
    store: ExpertStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(HostLoader):
        name = "slow"

        def load(
            self, layer: int, expert: int, into: torch.Tensor, cancelled: Callable[[], bool], form: str = ""
        ) -> int:
            for _ in range(2000):
                if cancelled():
                    return 7
                threading.Event().wait(0.01)
            raise AssertionError("not given up")

    monkeypatch.setattr(measure, "GIVE_UP_S", 0.05)
    assert 0 < load_bandwidth(store, Slow(store), slots(store, 1)) <= 7 / 0.04


def test_a_store_that_cannot_be_read_makes_no_worker(desk: WorkerDesk, own_store: ExpertStore) -> None:
    file, _ = own_store.locate(0, 0)
    os.truncate(file, 4096)
    with pytest.raises(CorruptStoreError, match="make the store again"):
        desk.worker(loader=DiskLoader(own_store))
    file.unlink()
    with pytest.raises(LaunchError, match="loader disk cannot read"):
        load_bandwidth(own_store, DiskLoader(own_store), slots(own_store, 1))


# --- what a computation takes -----------------------------------------------------------------------------------------


def test_the_cost_of_a_computation_is_measured(
    desk: WorkerDesk, monkeypatch: pytest.MonkeyPatch, expected: Expected
) -> None:
    monkeypatch.setattr(measure, "CALL_S", 60.0)
    worker = desk.worker()
    call_s, row_s = worker.costs
    assert call_s + row_s > 0
    assert row_s >= 0
    main = desk.welcome(worker)
    main.loads_and_computes(1, desk.compute(2, 0, 1, 3), expected)


def test_a_long_computation_is_not_measured(desk: WorkerDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "CALL_S", 0.0)
    assert desk.worker().costs == (0.0, 0.0)


def test_experts_that_take_other_rows_are_not_measured(store: ExpertStore) -> None:
    def run(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return hidden @ torch.zeros(hidden.shape[1] + 1, 2)

    assert measure.device_costs(store, run) == (0.0, 0.0)


def test_a_profile_says_what_a_computation_takes(desk: WorkerDesk, store: ExpertStore) -> None:
    worker = desk.worker(loader=EmulatedLoader(MemoryLoader(store), Emulation(PROFILE)))
    call_s, row_s = worker.costs
    assert call_s + row_s == pytest.approx(PROFILE.compute_s(1))
    assert call_s + 9 * row_s == pytest.approx(PROFILE.compute_s(9))


def test_memory_of_an_accelerator_is_not_that_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where torch cannot say how much there is."""

    def memory(device: torch.device) -> tuple[int, int]:
        if device.type == "cuda":
            return 1 << 30, 1 << 34
        raise RuntimeError(f"no memory info for {device.type}")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", memory)
    assert measure.device_bytes("cuda:0") == 1 << 34
    assert measure.device_bytes("xpu:0") == 0
    assert measure.device_bytes("cpu") > 0


@pytest.mark.parametrize(("lasting", "taken"), [(0.001, 6), (0.06, 3), (5.0, 2)])
def test_the_first_restoring_is_not_measured(
    demo_store: Callable[[str], ExpertStore], monkeypatch: pytest.MonkeyPatch, lasting: float, taken: int
) -> None:
    """It imports and compiles what restores."""
    clock = SimpleNamespace(now=0.0)
    restored: list[str] = []

    def restore(slot: torch.Tensor, layer: int, form: str) -> None:
        clock.now += lasting if restored else 30.0
        restored.append(form)

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    loader = MemoryLoader(demo_store("bfloat16"))
    found = restoring_seconds(SimpleNamespace(restore=restore), loader, torch.zeros(1), 0, "int4")  # type: ignore[arg-type]
    assert found == pytest.approx(lasting)
    assert restored == ["int4"] * taken
