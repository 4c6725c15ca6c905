"""A main node's end of a stream that writes down what it hears, and a desk that makes workers for it to call."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from typing import Any

import pytest
import torch

from checkpoint.expert import ExpertArithmetic
from checkpoint.store import ExpertStore
from checkpoint.tensors import tensor_bytes, tensor_from_bytes
from scheduler.errors import ODMoEError
from support.nodes import remote_stream
from support.nodes.held import HeldArithmetic, HeldLoader
from wire.base import Channel, Node
from wire.lent_threads import LentThreads
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
from worker_node.form_choice import FormChoice
from worker_node.loaders.base import Loader
from worker_node.loaders.memory import MemoryLoader
from worker_node.node import Worker
from worker_node.worker_threads import WorkerThreads

WAIT_S = 30.0
LAYERS, EXPERTS, HIDDEN = 2, 4, 32
"""Of the model that the workers serve."""

NO_THREAD_FAILS = [
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("ignore:The given buffer is not writable"),
]
WRONG_ROWS = {
    "width": Tensor("bfloat16", (3, 31), bytes(3 * 31 * 2)),
    "bytes": Tensor("bfloat16", (3, 32), bytes(10)),
    "dtype": Tensor("float32", (3, 32), bytes(3 * 32 * 4)),
    "rows": Tensor("bfloat16", (2, 32), bytes(2 * 32 * 2)),
    "dims": Tensor("bfloat16", (96,), bytes(96 * 2)),
    "unknown dtype": Tensor("complex64", (3, 32), bytes(3 * 32 * 8)),
}
"""Hidden rows that cannot be computed with three weights."""


class Expected:
    """What the eager experts modules of Transformers' `model` make of a computation's rows."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, asked: Compute) -> torch.Tensor:
        hidden, weights = (tensor_from_bytes(t.dtype, t.shape, t.data) for t in (asked.hidden, asked.weights))
        rows = len(hidden)
        with torch.inference_mode():
            experts = self._model.model.layers[asked.layer].mlp.experts
            found: torch.Tensor = experts(hidden, torch.full((rows, 1), asked.expert), weights.view(rows, 1))
        return found

    def fits(self, answer: Any, asked: Compute) -> bool:
        """Is it the right answer, to the last bit?"""
        assert isinstance(answer, Computed), answer
        wanted = self(asked)
        found = tensor_from_bytes(answer.output.dtype, answer.output.shape, answer.output.data)
        return answer.call_id == asked.call_id and found.dtype == wanted.dtype and torch.equal(found, wanted)


class MainEnd:
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
            raise AssertionError(f"nothing came within {WAIT_S:g} s") from None

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
    fields: dict[str, Any] = {
        "version": PROTOCOL_VERSION,
        "fingerprint": store.manifest.model_digest,
        "dtype": store.manifest.dtype,
    }
    return Hello(**(fields | {"node": "main", "session": "one main node"} | changes))


class WorkerDesk:
    """Makes workers of one store, and main nodes that call them."""

    def __init__(self, store: ExpertStore, arithmetic: ExpertArithmetic) -> None:
        self.store = store
        self.arithmetic = arithmetic
        self.workers: list[Worker] = []

    def worker(
        self,
        slots: int = 2,
        loader: Loader | None = None,
        arithmetic: Any = None,
        forms: tuple[str, ...] = ("",),
        lent: LentThreads | None = None,
        checks: str = "all",
    ) -> Worker:
        name = f"w{len(self.workers)}"
        loader = loader or MemoryLoader(self.store)
        if isinstance(arithmetic, HeldArithmetic):
            arithmetic.serving = False
        made = Worker(
            name,
            self.store,
            arithmetic or self.arithmetic,
            loader,
            FormChoice(forms, slots),
            WorkerThreads(lent),
            checks,
        )
        self.workers.append(made)
        for held in (loader, arithmetic):
            if isinstance(held, HeldLoader | HeldArithmetic):
                held.serving = True
        return self.workers[-1]

    def connect(self, worker: Node) -> MainEnd:
        main = MainEnd()
        main.channel = remote_stream.connect(worker, main)
        return main

    def welcome(self, worker: Node) -> MainEnd:
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

    def close(self) -> None:
        """No thread of a worker's outlives it."""
        for worker in self.workers:
            worker.close()
        names = [w.name for w in self.workers]
        left = [t.name for t in threading.enumerate() if t.name.split("-")[0] in names]
        assert not left, left
