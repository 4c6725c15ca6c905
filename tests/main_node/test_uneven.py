"""Workers that are not alike: other slots, other loaders. Each is taken as it is, and the tokens are Transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from checkpoint.expert import ExpertArithmetic
from checkpoint.family import parse_dtype
from main_node.engine.engine import Engine
from main_node.engine.peers import Connect
from main_node.node import MainNode
from main_node.shape import model_shape
from main_node.sources import Computing
from scheduler.alignment import Alignment
from scheduler.core.groups import RoundRobin
from scheduler.core.machine import Core
from wire import inprocess
from wire import messages as w
from wire.base import Channel, Handler
from wire.rpc.client import connect
from wire.rpc.server import GrpcServer
from wire.traffic import Traffic, traffic_of
from worker_node.form_choice import FormChoice
from worker_node.loaders.disk import DiskLoader
from worker_node.loaders.memory import MemoryLoader
from worker_node.node import Worker

WAIT_S, TOKENS = 30.0, 16
SLOTS = (1, 2, 3)


class Watched:
    """What a worker is told goes by here: never more is in its slots than it has."""

    def __init__(self, to: Connect, slots: int) -> None:
        self._to, self._slots = to, slots
        self.held: dict[int, tuple[int, int]] = {}
        self.loads = 0
        self.most = 0

    def __call__(self, handler: Handler) -> Channel:
        self._channel = self._to(handler)
        return self

    def send(self, *messages: w.Message) -> None:
        for message in messages:
            self._count(message)
        self._channel.send(*messages)

    def _count(self, message: w.Message) -> None:
        if isinstance(message, w.Load):
            assert message.slot not in self.held
            assert message.slot < self._slots
            self.held[message.slot] = (message.layer, message.expert)
            self.loads += 1
        elif isinstance(message, w.Evict) or (isinstance(message, w.Compute) and message.evict):
            del self.held[message.slot]
        self.most = max(self.most, len(self.held))

    @property
    def traffic(self) -> Traffic | None:
        return traffic_of(self._channel)

    def close(self) -> None:
        self._channel.close()


class Fleet:
    """A main node without a shadow, and workers with one, two and three slots."""

    def __init__(self, store: Any, over_grpc: bool) -> None:
        manifest = store.manifest
        hello = w.Hello(w.PROTOCOL_VERSION, manifest.model_digest, manifest.dtype, "main")
        self.engine = Engine(Core(model_shape(store), RoundRobin(2), Alignment(), 4096), hello)
        arithmetic = ExpertArithmetic(manifest.config, manifest.dtype)
        loaders = (DiskLoader(store), MemoryLoader(store), DiskLoader(store))
        self.workers, self.servers, self.watched = [], [], []
        for number, (slots, loader) in enumerate(zip(SLOTS, loaders, strict=True)):
            worker = Worker(f"worker {number}", store, arithmetic, loader, FormChoice(slots=slots))
            self.workers.append(worker)
            self.watched.append(Watched(self._to(worker, over_grpc), slots))
            self.engine.peers.add_worker(number, self.watched[-1], WAIT_S)
        self.main = MainNode(store, self.engine, Computing(parse_dtype(manifest.dtype)))

    def _to(self, worker: Worker, over_grpc: bool) -> Connect:
        if not over_grpc:
            return lambda handler: inprocess.connect(worker, handler)
        server = GrpcServer(worker, "worker")
        self.servers.append(server)
        return lambda handler: connect(server.address, "worker", handler)

    def answer(self, prompt: list[int]) -> Any:
        *_, last = self.main.generate(prompt, TOKENS, ignore_eos=True)
        return last.report

    def close(self) -> None:
        self.main.close()
        for each in [*self.servers, *self.workers]:
            each.close()


@pytest.fixture(params=["embedded", "gRPC"])
def fleet(request: pytest.FixtureRequest, demo_store: Any) -> Iterator[Fleet]:
    made = Fleet(demo_store("float32"), request.param == "gRPC")
    yield made
    made.close()


@pytest.mark.slow
def test_each_worker_is_taken_as_it_is(fleet: Fleet, reference: Any) -> None:
    for number in (0, 4):
        expected = reference("float32", number, TOKENS)
        report = fleet.answer(expected.prompt)
        assert report.token_ids == expected.tokens
    nodes = fleet.engine.peers.nodes()
    assert [node.slots for node in nodes] == list(SLOTS)
    assert [node.loader for node in nodes] == ["disk", "memory", "disk"]
    assert all(node.load_bytes_per_s > 0 and node.round_trip_s > 0 for node in nodes)
    loads = [node.loads for node in nodes]
    assert loads == [worker.loads for worker in fleet.workers]
    assert min(loads) > 0, "none stands idle, though a busy disk may be many times as slow as memory"
    most = report.resident_experts_max
    assert all(held <= slots for held, slots in zip(most, SLOTS, strict=True))
    assert most[2] > 1, "more slots than one are used where there are some"
    assert all(watched.loads >= ended for watched, ended in zip(fleet.watched, loads, strict=True))
    assert all(watched.most <= slots for watched, slots in zip(fleet.watched, SLOTS, strict=True))
    if not fleet.servers:
        assert report.wire_bytes_per_token is None
        return
    wire, paper = report.wire_bytes_per_token, 192 * 4 * 8 * 2  # hidden size, float32, layers, top-k
    assert wire["to_shadow"] == wire["from_shadow"] == 0
    for way in ("to_workers", "from_workers"):  # sixteen messages a token, each with what describes its embedding
        assert paper + 16 * 10 < wire[way] < paper + 16 * 64
    for node in nodes:
        assert node.sent_bytes > node.received_bytes / 2 > 0
