"""A small store, its model, and a desk that makes workers of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.expert import ExpertArithmetic
from checkpoint.sharding.source import open_source
from checkpoint.store import ExpertStore
from support.models.checkpoints import build
from support.models.store_making import shard
from support.nodes.held import HeldArithmetic, HeldLoader
from support.nodes.stepping_clock import SteppingClock
from support.nodes.worker_desk import EXPERTS, HIDDEN, LAYERS, Expected, WorkerDesk


@pytest.fixture(scope="session")
def model() -> Any:
    """A random Mixtral in bfloat16, computed eagerly."""
    made = build("mixtral", num_hidden_layers=LAYERS, num_local_experts=EXPERTS, hidden_size=HIDDEN)
    made.set_experts_implementation("eager")
    return made.to(torch.bfloat16).eval()


@pytest.fixture(scope="session")
def store(model: Any, tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    folder = tmp_path_factory.mktemp("worker")
    model.save_pretrained(folder / "model")
    return shard(open_source(folder / "model"), folder / "store")


@pytest.fixture
def own_store(store: ExpertStore, tmp_path: Path) -> ExpertStore:
    """A copy to damage."""
    return ExpertStore.open(Path(shutil.copytree(store.path, tmp_path / "store")))


@pytest.fixture(scope="session")
def arithmetic(store: ExpertStore) -> ExpertArithmetic:
    return ExpertArithmetic(store.manifest.config, store.manifest.dtype)


@pytest.fixture(scope="session")
def blob(store: ExpertStore) -> Callable[[int, int], bytes]:
    """An expert's bytes, read by the plainest means."""

    def read(layer: int, expert: int) -> bytes:
        file, place = store.locate(layer, expert)
        return file.read_bytes()[place.offset :][: place.length]

    return read


@pytest.fixture(scope="session")
def expected(model: Any) -> Expected:
    return Expected(model)


@pytest.fixture
def desk(store: ExpertStore, arithmetic: ExpertArithmetic) -> Iterator[WorkerDesk]:
    made = WorkerDesk(store, arithmetic)
    yield made
    made.close()


@pytest.fixture
def held_loader(store: ExpertStore) -> HeldLoader:
    return HeldLoader(store)


@pytest.fixture
def held_arithmetic(arithmetic: ExpertArithmetic) -> HeldArithmetic:
    return HeldArithmetic(arithmetic)


@pytest.fixture
def stepping_clock(monkeypatch: pytest.MonkeyPatch) -> SteppingClock:
    """A clock for an emulation: it moves by what is waited for a load, and by nothing else."""
    return SteppingClock(monkeypatch)
