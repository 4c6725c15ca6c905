"""A worker's store is damaged in the middle of an answer: the tokens stay the same, or the request fails by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from checkpoint.expert import ExpertArithmetic
from checkpoint.family import parse_dtype
from checkpoint.store import ExpertStore
from main_node.engine.engine import Engine
from main_node.node import MainNode
from main_node.shape import model_shape
from main_node.sources import Computing
from scheduler.alignment import Alignment
from scheduler.core.groups import RoundRobin
from scheduler.core.machine import Core
from scheduler.errors import RequestFailedError
from support.nodes.damage import flip
from support.nodes.engine_world import WAIT_S, nothing_left
from wire import inprocess
from wire import messages as w
from worker_node.form_choice import FormChoice
from worker_node.loaders.load_checks import LoadChecks
from worker_node.loaders.make import make_loader
from worker_node.node import Worker

WORKERS, TOKENS = 3, 6
LAYER = 4

pytestmark = pytest.mark.timeout(120)


class Hosts:
    """A main node and workers, each with a store of its own."""

    def __init__(self, store: ExpertStore, folder: Path, loader: str, checks: str, slots: int) -> None:
        manifest = store.manifest
        hello = w.Hello(w.PROTOCOL_VERSION, manifest.model_digest, manifest.dtype, "main")
        self.engine = Engine(Core(model_shape(store), RoundRobin(2), Alignment(), 4096), hello)
        arithmetic = ExpertArithmetic(manifest.config, manifest.dtype)
        self.stores: list[ExpertStore] = []
        self.workers: list[Worker] = []
        for number in range(WORKERS):
            self.stores.append(ExpertStore.open(Path(shutil.copytree(store.path, folder / str(number)))))
            own = make_loader(loader, self.stores[-1])
            worker = Worker(
                f"worker {number}", self.stores[-1], arithmetic, own, FormChoice(slots=slots), checks=checks
            )
            self.workers.append(worker)
            self.engine.peers.add_worker(number, partial(inprocess.connect, worker), WAIT_S)
        self.main = MainNode(store, self.engine, Computing(parse_dtype(manifest.dtype)))

    def damage(self, number: int) -> None:
        """One bit of each expert of a layer."""
        store = self.stores[number]
        for expert in range(len(store.manifest.layers[LAYER].blobs)):
            flip(store, LAYER, expert)

    def answer(self, prompt: list[int], then: Callable[[], object]) -> list[int]:
        """`then` is called after the third token."""
        tokens = []
        for step in self.main.generate(prompt, TOKENS, ignore_eos=True):
            tokens += [step.token_id] if step.token_id is not None else []
            if len(tokens) == 3 and step.report is None:
                then()
        return tokens

    def close(self) -> None:
        self.main.close()
        for worker in self.workers:
            worker.close()


@pytest.fixture(params=[("disk", "all"), ("disk", "auto"), ("memory", "auto")], ids="-".join)
def hosts(
    request: pytest.FixtureRequest, demo_store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hosts]:
    loader, checks = request.param
    if checks == "auto":  # only for what it checks because files have changed
        monkeypatch.setattr(LoadChecks, "_due", lambda self: False)
    made = Hosts(demo_store("float32"), tmp_path, loader, checks, slots=2)
    yield made
    made.close()


@pytest.mark.slow
def test_other_workers_load_what_is_damaged_on_one(hosts: Hosts, reference: Any) -> None:
    expected = reference("float32", 0, TOKENS)
    assert hosts.answer(expected.prompt, partial(hosts.damage, 1)) == expected.tokens
    assert hosts.answer(expected.prompt, lambda: None) == expected.tokens, "nor in the next answer"
    assert len(hosts.engine.peers.workers) == WORKERS, "what is whole there can be loaded there"
    assert nothing_left(hosts.engine)


def test_what_is_damaged_everywhere_fails_the_request_by_name(hosts: Hosts, reference: Any) -> None:
    expected = reference("float32", 0, TOKENS)

    def damage() -> None:
        for number in range(WORKERS):
            hosts.damage(number)

    with pytest.raises(RequestFailedError, match=f"CorruptStoreError.*of layer {LAYER} fails its checksum"):
        hosts.answer(expected.prompt, damage)
    damage()  # repaired
    assert hosts.answer(expected.prompt, lambda: None) == expected.tokens
    assert nothing_left(hosts.engine)


def test_without_checks_the_tokens_are_others(demo_store: Any, tmp_path: Path, reference: Any) -> None:
    """What the other tests would show if nothing were checked."""
    expected = reference("float32", 0, TOKENS)
    hosts = Hosts(demo_store("float32"), tmp_path, "disk", "none", slots=2)

    def damage() -> None:
        """Each expert is all zeros."""
        for store in hosts.stores:
            for layer in store.manifest.layers.values():
                file = store.path / layer.file
                file.write_bytes(bytes(file.stat().st_size))

    assert hosts.answer(expected.prompt, damage) != expected.tokens
    hosts.close()
