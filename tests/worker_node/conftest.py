"""A small store, a main node that writes down what it hears, and a worker whose loads and computations can be held."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from checkpoint.expert import ExpertArithmetic
from checkpoint.sharding.shard import shard
from checkpoint.sharding.source import open_source
from checkpoint.store import ExpertStore
from checkpoint.tensors import tensor_bytes, tensor_from_bytes
from scheduler.errors import ODMoEError
from wire import inprocess
from wire.base import Channel
from wire.messages import (
    PROTOCOL_VERSION,
    AskUsage,
    Compute,
    Computed,
    Failed,
    Hello,
    Load,
    Message,
    Tensor,
    WorkerReady,
    WorkerUsage,
)
from worker_node.loaders.base import HostLoader, Loader
from worker_node.loaders.memory import MemoryLoader
from worker_node.node import Worker

WAIT_S = 20.0
LAYERS, EXPERTS, HIDDEN = 2, 4, 32


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Matrices this small are slower on two threads, far slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random Mixtral in bfloat16, computed eagerly; `model.path` is where it was saved."""
    from transformers import AutoModelForCausalLM, MixtralConfig

    config = MixtralConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
    )
    found = AutoModelForCausalLM.from_config(config, experts_implementation="eager").to(torch.bfloat16).eval()
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for value in found.parameters():
            value.normal_(0, 0.3, generator=random)
    found.path = tmp_path_factory.mktemp("model")
    found.save_pretrained(found.path)
    return found


@pytest.fixture(scope="session")
def store(model: Any, tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    return shard(open_source(model.path), tmp_path_factory.mktemp("stores") / "store")


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


class Expected:
    """What Transformers' eager experts module makes of a computation's rows."""

    def __init__(self, model: Any) -> None:
        assert model.config._experts_implementation == "eager"
        self._model = model

    def __call__(self, asked: Compute) -> torch.Tensor:
        hidden, weights = (tensor_from_bytes(t.dtype, t.shape, t.data) for t in (asked.hidden, asked.weights))
        rows = len(hidden)
        with torch.inference_mode():
            experts = self._model.model.layers[asked.layer].mlp.experts
            return experts(hidden, torch.full((rows, 1), asked.expert), weights.view(rows, 1))

    def fits(self, answer: Any, asked: Compute) -> bool:
        """Is it the right answer, to the last bit?"""
        assert isinstance(answer, Computed), answer
        wanted = self(asked)
        found = tensor_from_bytes(answer.output.dtype, answer.output.shape, answer.output.data)
        return answer.call_id == asked.call_id and found.dtype == wanted.dtype and torch.equal(found, wanted)


@pytest.fixture(scope="session")
def expected(model: Any) -> Expected:
    return Expected(model)


class MainNode:
    """The client's end of a stream: asks, and keeps what it is told."""

    def __init__(self) -> None:
        self.got: SimpleQueue[Message] = SimpleQueue()
        self.ends: list[ODMoEError | None] = []
        self.channel: Channel | None = None

    def on_message(self, message: Message) -> None:
        self.got.put(message)

    def on_close(self, error: ODMoEError | None) -> None:
        self.ends.append(error)

    def send(self, *messages: Message) -> None:
        assert self.channel is not None
        for message in messages:
            self.channel.send(message)

    def next(self) -> Message:
        try:
            return self.got.get(timeout=WAIT_S)
        except Empty:
            pytest.fail(f"nothing came within {WAIT_S:g} s")

    def nothing_came(self) -> bool:
        return self.got.empty()

    def hear(self, count: int) -> dict[tuple[str, int], Any]:
        """The next answers. A computation's may overtake that of the load before it: two threads send them."""
        found: dict[tuple[str, int], Any] = {}
        for _ in range(count):
            answer = self.next()
            key = (type(answer).__name__, getattr(answer, "load_id", 0) or getattr(answer, "call_id", 0))
            assert key not in found, "answered twice"
            found[key] = answer
        return found

    def loads_and_computes(self, load_id: int, asked: Compute, expected: Expected) -> None:
        self.send(Load(load_id, asked.slot, asked.layer, asked.expert), asked)
        answers = self.hear(2)
        assert set(answers) == {("Loaded", load_id), ("Computed", asked.call_id)}
        assert expected.fits(answers["Computed", asked.call_id], asked)

    def failure(self, error: str, load_id: int = 0, call_id: int = 0) -> Failed:
        answer = self.next()
        assert isinstance(answer, Failed), answer
        assert (answer.error, answer.load_id, answer.call_id) == (error, load_id, call_id), answer
        return answer

    def usage(self) -> WorkerUsage:
        self.send(AskUsage())
        answer = self.next()
        assert isinstance(answer, WorkerUsage), answer
        return answer


def hello(store: ExpertStore, **changes: Any) -> Hello:
    fields = {"version": PROTOCOL_VERSION, "fingerprint": store.manifest.fingerprint, "dtype": store.manifest.dtype}
    return Hello(**(fields | {"node": "main"} | changes))


class Desk:
    """Makes workers and main nodes, and closes them."""

    def __init__(self, store: ExpertStore, arithmetic: ExpertArithmetic) -> None:
        self.store = store
        self.arithmetic = arithmetic
        self.workers: list[Worker] = []

    def worker(
        self, slots: int = 2, loader: Loader | None = None, arithmetic: Any = None, forms: tuple[str, ...] = ("",)
    ) -> Worker:
        name = f"w{len(self.workers)}"
        loader = loader or MemoryLoader(self.store)
        if isinstance(arithmetic, HeldArithmetic):
            arithmetic.serving = False
        self.workers.append(Worker(name, self.store, arithmetic or self.arithmetic, loader, slots, forms))
        for held in (loader, arithmetic):
            if isinstance(held, HeldLoader | HeldArithmetic):
                held.serving = True
        return self.workers[-1]

    def connect(self, worker: Worker) -> MainNode:
        main = MainNode()
        main.channel = inprocess.connect(worker, main)
        return main

    def welcome(self, worker: Worker) -> MainNode:
        """Connected, and past the handshake."""
        main = self.connect(worker)
        main.send(self.hello())
        assert isinstance(main.next(), WorkerReady)
        return main

    def hello(self, **changes: Any) -> Hello:
        return hello(self.store, **changes)

    def compute(self, call: int, slot: int, layer: int, expert: int, rows: int = 3, evict: bool = True) -> Compute:
        """Random rows, the same for the same call."""
        random = torch.Generator().manual_seed(call)
        hidden = torch.randn(rows, HIDDEN, generator=random).to(torch.bfloat16)
        weights = torch.rand(rows, generator=random).to(torch.bfloat16)
        tensors = [Tensor(*tensor_bytes(t)) for t in (hidden, weights)]
        return Compute(call, slot, layer, expert, tensors[0], tensors[1], evict)


@pytest.fixture
def desk(store: ExpertStore, arithmetic: ExpertArithmetic) -> Iterator[Desk]:
    """No thread of a worker's outlives its test."""
    made = Desk(store, arithmetic)
    yield made
    for worker in made.workers:
        worker.close()
    names = [w.name for w in made.workers]
    left = [t.name for t in threading.enumerate() if t.name.split("-")[0] in names]
    assert left == []


class Gate:
    """Where a thread arrives, is seen, and waits until it may go on."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.opened = threading.Event()

    def open(self) -> None:
        self.opened.set()

    def wait_for_arrival(self) -> None:
        assert self.arrived.wait(WAIT_S)

    def pass_through(self) -> None:
        self.arrived.set()
        assert self.opened.wait(WAIT_S)


class HeldLoader(HostLoader):
    """Loads from memory; at the gate of an expert it waits until that opens, or until the load is given up.

    Gates, errors and `begun` are for the loads of a worker that serves, not for those that measure it before.
    """

    name = "held"

    def __init__(self, store: ExpertStore) -> None:
        super().__init__(store)
        self.inner = MemoryLoader(store)
        self.gates: dict[tuple[int, int], Gate] = {}
        self.errors: dict[tuple[int, int], Exception] = {}
        self.begun: list[tuple[int, int]] = []
        self.serving = False

    def hold(self, layer: int, expert: int) -> Gate:
        return self.gates.setdefault((layer, expert), Gate())

    def load(self, layer: int, expert: int, into: torch.Tensor, cancelled: Callable[[], bool], form: str = "") -> int:
        if not self.serving:
            return self.inner.load(layer, expert, into, cancelled, form)
        self.begun.append((layer, expert))
        if error := self.errors.pop((layer, expert), None):
            raise error
        if gate := self.gates.get((layer, expert)):
            gate.arrived.set()
            for _ in range(int(WAIT_S / 0.005)):
                if gate.opened.wait(0.005) or cancelled():
                    break
            else:
                raise AssertionError("held for too long")
        return self.inner.load(layer, expert, into, cancelled, form)

    def close(self) -> None:
        self.inner.close()


class HeldArithmetic:
    """The real arithmetic behind a gate a layer, for the computations of a worker that serves."""

    def __init__(self, inner: ExpertArithmetic) -> None:
        self.inner = inner
        self.gates: dict[int, Gate] = {}
        self.serving = True

    def hold(self, layer: int) -> Gate:
        return self.gates.setdefault(layer, Gate())

    def bind(self, layer: int, views: dict[str, torch.Tensor]) -> Callable[..., torch.Tensor]:
        compute = self.inner.bind(layer, views)

        def held(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            if self.serving and (gate := self.gates.get(layer)):
                gate.pass_through()
            return compute(hidden, weights)

        return held


@pytest.fixture
def held_loader(store: ExpertStore) -> HeldLoader:
    return HeldLoader(store)


@pytest.fixture
def held_arithmetic(arithmetic: ExpertArithmetic) -> HeldArithmetic:
    return HeldArithmetic(arithmetic)
