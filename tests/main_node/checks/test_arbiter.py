"""The main node's own computation of experts, beside a worker's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.expert import ExpertArithmetic
from checkpoint.store import ExpertStore
from main_node.checks.arbiter import MOST_WAITING, Arbiter
from scheduler.errors import CorruptStoreError
from scheduler.types import ExpertId
from support.nodes.engine_world import WAIT_S
from worker_node.form_choice import FormChoice
from worker_node.loaders.memory import MemoryLoader
from worker_node.node import Worker

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def arbiter_of() -> Iterator[Callable[[ExpertStore], Arbiter]]:
    made: list[Arbiter] = []

    def build(store: ExpertStore) -> Arbiter:
        made.append(Arbiter(store))
        return made[-1]

    yield build
    for arbiter in made:
        arbiter.close()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 3])
def test_it_computes_the_bits_of_a_worker(
    rows: int, dtype: str, demo_store: Callable[[str], ExpertStore], arbiter_of: Any
) -> None:
    store = demo_store(dtype)
    worker = Worker(
        "w", store, ExpertArithmetic(store.manifest.config, dtype), MemoryLoader(store), FormChoice(slots=1)
    )
    arbiter = arbiter_of(store)
    generator = torch.Generator().manual_seed(rows)
    for expert in (ExpertId(0, 0), ExpertId(7, 5)):
        hidden = torch.randn(rows, store.manifest.config["hidden_size"], generator=generator)
        hidden, weights = (
            hidden.to(getattr(torch, dtype)),
            torch.rand(rows, generator=generator).to(getattr(torch, dtype)),
        )
        worker.loader.load(*expert, worker.slots.buffers[0], lambda: False)
        assert torch.equal(arbiter.compute(expert, hidden, weights), worker.run(0, expert.layer, "", hidden, weights))
    worker.close()


def test_it_does_not_judge_by_a_damaged_store(
    tmp_path: Path, demo_store: Callable[[str], ExpertStore], arbiter_of: Any
) -> None:
    store = demo_store("float32")
    file, blob = store.locate(2, 3)
    copy = tmp_path / file.name
    data = bytearray(file.read_bytes())
    data[blob.offset + blob.length // 2] ^= 4
    copy.write_bytes(data)
    damaged = ExpertStore(tmp_path, store.manifest)
    hidden = torch.ones(1, store.manifest.config["hidden_size"])
    with pytest.raises(CorruptStoreError, match=r"expert 3 of layer 2 .* fails its checksum"):
        arbiter_of(damaged).compute(ExpertId(2, 3), hidden, torch.ones(1))
    arbiter_of(damaged).compute(ExpertId(2, 4), hidden, torch.ones(1))


def test_few_may_wait_for_it(demo_store: Callable[[str], ExpertStore], arbiter_of: Any) -> None:
    arbiter, gate, done = arbiter_of(demo_store("float32")), threading.Event(), threading.Semaphore(0)

    def job() -> None:
        gate.wait(WAIT_S)
        done.release()

    assert [arbiter.submit(job) for _ in range(MOST_WAITING + 3)] == [True] * (MOST_WAITING + 1) + [False] * 2
    gate.set()
    for _ in range(MOST_WAITING + 1):
        assert done.acquire(timeout=WAIT_S)
    arbiter.close()
    assert not arbiter.submit(job)
