"""Loads are compared with the store's checksums: what is damaged is never computed, and checks keep to their budget."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.forms import FORMS
from checkpoint.manifest import checksum
from checkpoint.sharding.form_files import add_forms
from checkpoint.store import ExpertStore
from scheduler.emulation.clock import Emulation
from scheduler.errors import CorruptStoreError
from scheduler.timing.profile import find_profile
from support.nodes.damage import flip
from support.nodes.stepping_clock import SteppingClock
from support.nodes.worker_desk import EXPERTS, LAYERS, NO_THREAD_FAILS, Expected, WorkerDesk
from wire.messages import Evict, Load, Loaded
from worker_node.loaders import disk
from worker_node.loaders.digest import Digests
from worker_node.loaders.emulated import EmulatedLoader
from worker_node.loaders.load_checks import COST, CheckedLoad, LoadChecks
from worker_node.loaders.make import make_loader
from worker_node.loaders.memory import MemoryLoader
from worker_node.loaders.slab import HostSlab

pytestmark = NO_THREAD_FAILS
each_loader = pytest.mark.parametrize("name", ["disk", "memory"])
each_form = pytest.mark.parametrize("form", ["", *FORMS])


@pytest.fixture(scope="module")
def formed(store: ExpertStore, tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    copied = shutil.copytree(store.path, tmp_path_factory.mktemp("formed") / "store")
    return add_forms(ExpertStore.open(Path(copied)), tuple(FORMS))


@pytest.fixture
def damaged(desk: WorkerDesk, formed: ExpertStore, tmp_path: Path) -> ExpertStore:
    """A store of the desk's own, to be damaged while a worker serves."""
    desk.store = ExpertStore.open(Path(shutil.copytree(formed.path, tmp_path / "store")))
    return desk.store


# --- what is damaged --------------------------------------------------------------------------------------------------


@each_loader
@each_form
@pytest.mark.parametrize("at", [0, 100, -1], ids=["first byte", "a byte", "last byte"])
def test_a_damaged_expert_is_named_and_not_loaded(
    desk: WorkerDesk, damaged: ExpertStore, name: str, form: str, at: int
) -> None:
    worker = desk.worker(slots=2, loader=make_loader(name, damaged, forms=("", *FORMS)), forms=("", *FORMS))
    main = desk.welcome(worker)
    length = damaged.locate(1, 2, form)[1].length
    path = flip(damaged, 1, 2, form, at % length)
    main.send(Load(1, 0, 1, 2, form), desk.compute(9, 0, 1, 2), Load(2, 1, 0, 3, form))
    failure = main.failure("CorruptStoreError", load_id=1)
    for part in ("expert 2 of layer 1", str(path), os.uname().nodename, form):
        assert part in failure.message
    loaded = main.next()
    assert isinstance(loaded, Loaded)
    assert (loaded.load_id, loaded.checked) == (2, True)
    usage = main.usage()
    assert (usage.loads, usage.loads_checked) == (1, 1), "the failed one is not counted"
    assert main.nothing_came(), "no output of the damaged expert"


@each_loader
@pytest.mark.parametrize("repair", ["in place", "replaced"])
def test_an_expert_is_loaded_again_once_its_store_was_repaired(
    desk: WorkerDesk, damaged: ExpertStore, expected: Expected, name: str, repair: str
) -> None:
    main = desk.welcome(desk.worker(slots=1, loader=make_loader(name, damaged)))
    whole = damaged.locate(0, 1)[0].read_bytes()
    path = flip(damaged, 0, 1)
    main.send(Load(1, 0, 0, 1))
    main.failure("CorruptStoreError", load_id=1)
    main.send(Evict(0))
    if repair == "in place":
        flip(damaged, 0, 1)
    else:
        path.with_suffix(".new").write_bytes(whole)
        path.with_suffix(".new").replace(path)
    main.loads_and_computes(2, desk.compute(3, 0, 0, 1), expected)


@each_loader
def test_with_none_a_damaged_expert_is_loaded(desk: WorkerDesk, damaged: ExpertStore, name: str) -> None:
    """What the checks are for."""
    main = desk.welcome(desk.worker(loader=make_loader(name, damaged), checks="none"))
    flip(damaged, 0, 1)
    main.send(Load(1, 0, 0, 1))
    loaded = main.next()
    assert isinstance(loaded, Loaded)
    assert not loaded.checked
    assert main.usage().loads_checked == 0


@each_loader
def test_auto_checks_what_has_changed_also_where_no_check_is_due(
    desk: WorkerDesk, damaged: ExpertStore, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadChecks, "_due", lambda self: False)
    main = desk.welcome(desk.worker(slots=1, loader=make_loader(name, damaged), checks="auto"))

    def load(number: int, expert: int) -> bool:
        main.send(Load(number, 0, 0, expert))
        loaded = main.next()
        assert isinstance(loaded, Loaded)
        main.send(Evict(0))
        return loaded.checked

    assert not load(1, 1)
    flip(damaged, 0, 1)
    main.send(Load(2, 0, 0, 1))
    main.failure("CorruptStoreError", load_id=2)
    main.send(Evict(0), Load(3, 0, 0, 1))
    main.failure("CorruptStoreError", load_id=3)
    main.send(Evict(0))
    assert load(4, 2), "another expert of the same file"
    assert not load(5, 2), "it was found whole"
    flip(damaged, 0, 1)
    checked = [load(6 + number, 1) for number in range(3)]
    assert checked[0]
    assert not checked[2], "the file was as it is now when the load before began"


def test_memory_that_is_damaged_on_its_way_is_seen(desk: WorkerDesk, store: ExpertStore) -> None:
    """A byte that is another in the slot than on the disk."""

    class Damaging(MemoryLoader):
        serving = False

        def load(self, layer: int, expert: int, into: torch.Tensor, *args: Any) -> int:
            if self.serving and args[-1] is not None:
                source = self._mapped.blob(layer, expert).clone()
                source[77] ^= 1
                into[: len(source)] = source
                args[-1].add(into[: len(source)].numpy(), more=False)
                return len(source)
            return super().load(layer, expert, into, *args)

    loader = Damaging(store)
    main = desk.welcome(desk.worker(loader=loader))
    loader.serving = True
    main.send(Load(1, 0, 0, 1))
    main.failure("CorruptStoreError", load_id=1)


def test_a_host_slab_is_checked_when_it_is_read(damaged: ExpertStore) -> None:
    path = flip(damaged, 1, 3, "int4")
    HostSlab(damaged, pinned=False)
    with pytest.raises(CorruptStoreError, match=f"expert 3 of layer 1 in {path}"):
        HostSlab(damaged, pinned=False, forms=("", "int4"))


# --- how ----------------------------------------------------------------------------------------------------------


@each_loader
def test_pieces_make_the_checksum_of_the_whole(
    store: ExpertStore, blob: Callable[[int, int], bytes], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One page a piece, and a last one of a page: each piece but that is hashed while the next one is read."""
    monkeypatch.setattr(disk, "TAIL_BYTES", 4096)
    loader, digests = make_loader(name, store), Digests("pieces")
    monkeypatch.setattr(type(loader), "piece_bytes", 4 * 4096)
    slot = torch.zeros(store.manifest.blob_bytes + 4096, dtype=torch.uint8)
    slot = slot[-slot.data_ptr() % 4096 :][: store.manifest.blob_bytes]
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            digest = digests.new()
            loader.load(layer, expert, slot, lambda: False, "", digest)
            assert digest.hex() == checksum(blob(layer, expert)) == store.locate(layer, expert)[1].checksum
    loader.close()
    digests.close()


def test_a_load_that_is_given_up_is_not_checked(desk: WorkerDesk, store: ExpertStore) -> None:
    checks = LoadChecks("w", store, MemoryLoader(store), "all")
    slot = torch.zeros(store.manifest.blob_bytes, dtype=torch.uint8)
    load = checks.load(0, 1, slot, lambda: True, "")
    assert load == CheckedLoad(0, False, 0.0)
    assert checks.checked == 0


def test_a_check_takes_no_emulated_time(desk: WorkerDesk, store: ExpertStore, stepping_clock: SteppingClock) -> None:
    emulation = Emulation(replace(find_profile("rtx3090-1gbe"), load_s=0.04), stepping_clock)
    main = desk.welcome(desk.worker(loader=EmulatedLoader(MemoryLoader(store), emulation)))
    main.send(Load(1, 0, 1, 2))
    loaded = main.next()
    assert isinstance(loaded, Loaded)
    assert loaded.checked
    assert loaded.seconds == pytest.approx(0.04)


# --- what it costs ----------------------------------------------------------------------------------------------------


class Budget:
    """`auto` with loads and checks whose times are given."""

    def __init__(self, store: ExpertStore, first_check_s: float) -> None:
        self.checks = LoadChecks("w", store, MemoryLoader(store), "auto")
        self.checks._check_s = first_check_s  # as `measure` would find
        self.checks._saved_s = 4 * first_check_s
        self.load_s = self.check_s = 0.0
        self.due: list[bool] = []

    def run(self, loads: int, load_s: float, check_s: float) -> None:
        for _ in range(loads):
            due = self.checks._due()
            self.due.append(due)
            self.checks.on_loaded(load_s + check_s * due, CheckedLoad(1, due, check_s * due))
            self.load_s += load_s
            self.check_s += check_s * due


@pytest.mark.parametrize("share", [0.001, 0.01, 0.0199])
def test_all_are_checked_where_that_costs_less_than_the_bound(store: ExpertStore, share: float) -> None:
    budget = Budget(store, share)
    budget.run(2000, 1.0, share)
    assert all(budget.due)


@pytest.mark.parametrize("share", [0.03, 0.1, 0.5, 3.0])
def test_as_many_are_checked_as_cost_the_bound(store: ExpertStore, share: float) -> None:
    budget = Budget(store, 0.01)  # measured as too cheap
    budget.run(20_000, 1.0, share)
    assert budget.check_s / budget.load_s == pytest.approx(COST, rel=0.1)
    last = [number for number, due in enumerate(budget.due) if due]
    gaps = [after - before for before, after in itertools.pairwise(last[20:])]
    assert max(gaps) <= 2 * share / COST + 2, "spread evenly"


def test_no_expert_of_a_regular_order_is_left_out(store: ExpertStore) -> None:
    """16 experts in turn, and time for each eighth: without a varying distance two of them would have every check."""
    budget = Budget(store, 0.16)
    budget.run(4000, 1.0, 0.16)
    each = [sum(budget.due[expert::16]) for expert in range(16)]
    assert min(each) > 0.5 * sum(each) / 16


def test_cheap_checks_save_up_for_few_dear_ones(store: ExpertStore) -> None:
    budget = Budget(store, 0.005)
    budget.run(10_000, 1.0, 0.005)
    budget.due.clear()
    budget.run(100, 1.0, 0.2)
    assert sum(budget.due) <= 20, "10 are what 100 loads allow"


def test_a_check_that_was_held_up_once_stops_no_later_ones(store: ExpertStore) -> None:
    budget = Budget(store, 0.01)
    budget.run(100, 1.0, 0.01)
    budget.run(1, 1.0, 60.0)
    budget.run(200, 1.0, 0.01)
    assert all(budget.due[-100:])


def test_what_a_check_takes_is_measured(store: ExpertStore) -> None:
    checks = LoadChecks("w", store, MemoryLoader(store), "auto")
    checks.measure(torch.zeros(store.manifest.blob_bytes, dtype=torch.uint8))
    assert 0 < checks._check_s < 1
    assert checks._due(), "the first load is checked"
