"""Ten thousand frames for each kind of node, and for the main node: no crash, no healthy stream cut, flat memory.

About a minute. The figures are printed. `make fuzz` takes FRAMES of each instead, from FUZZ_SEED on.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from checkpoint.expert import ExpertArithmetic
from checkpoint.tensors import tensor_bytes
from main_node.engine import peer as peer_module
from odmoe.chaos.usage import usage_of
from scheduler.errors import ODMoEError
from shadow_node.node import Shadow
from support.fuzz.feed import FuzzedPeer, feed_node, used_mib
from support.fuzz.frames import Frames
from support.nodes import remote_stream
from support.nodes.tapped_cluster import TappedCluster
from wire import messages as w
from wire.base import Channel, Node, Role
from wire.codec import FROM_SHADOW, FROM_WORKER, TO_SHADOW, TO_WORKER
from worker_node.form_choice import FormChoice
from worker_node.host import HostPlace
from worker_node.loaders.memory import MemoryLoader
from worker_node.node import Worker

FRAMES = int(os.environ.get("FRAMES", 10_000))
"""A multiple of `ROUND`."""
ROUND = 1_000
"""A node's health is looked at after so many."""
ROUNDS = FRAMES // ROUND
SEED = int(os.environ.get("FUZZ_SEED", 0))
pytestmark = [pytest.mark.system, pytest.mark.timeout(max(600, FRAMES // 20))]
WARM = 3
"""Rounds after which memory must be flat."""
GROWTH_MIB = 1.0
RESIDENT_MIB = 64.0 * max(1.0, FRAMES / 100_000)
"""Its growth at most: allocators keep a little more with every thousand threads."""
SLOTS = 3
WAIT_S = 60.0
TOKENS = 6


class Client:
    """A main node's end of a healthy stream."""

    def __init__(self, node: Node, hello: w.Hello) -> None:
        self.got: SimpleQueue[w.Message] = SimpleQueue()
        self.ends: list[ODMoEError | None] = []
        self.channel: Channel = remote_stream.connect(node, self)
        self.channel.send(hello)
        assert isinstance(self.next(), w.WorkerReady | w.ShadowReady)

    def on_message(self, message: w.Message) -> None:
        self.got.put(message)

    def on_close(self, error: ODMoEError | None) -> None:
        self.ends.append(error)

    def next(self) -> w.Message:
        return self.got.get(timeout=WAIT_S)

    def ask(self, *messages: w.Message, answers: int) -> list[w.Message]:
        for message in messages:
            self.channel.send(message)
        return [self.next() for _ in range(answers)]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A line for each lost peer would be kept, and counted as the node's memory."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def settled(threads: int) -> int:
    """The number of threads, once it is no more than before."""
    end = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < end:
        time.sleep(0.05)
    return threading.active_count()


def resident_mib() -> float:
    usage = usage_of(os.getpid())
    assert usage is not None
    return usage.memory_bytes / 2**20


def fuzz(name: str, round_of: Callable[[int], int], healthy: Callable[[], None], capsys: Any) -> None:
    """Run the rounds, and print what they cost."""
    healthy()
    gc.collect()
    gc.freeze()  # what is there already, models too, takes a second to look through
    began, start, threads = time.monotonic(), used_mib(), threading.active_count()
    warm = resident = 0.0
    streams = 0
    for number in range(ROUNDS):
        streams += round_of(SEED + number)
        healthy()
        gc.collect()
        if number + 1 == WARM:
            warm, resident = used_mib(), resident_mib()
    gc.unfreeze()
    end, grown = used_mib(), resident_mib() - resident
    with capsys.disabled():
        print(
            f"\n{name}: {FRAMES} frames in {streams} streams, {time.monotonic() - began:.1f} s; memory in use "
            f"{start:.2f} MiB before, {warm:.2f} after {WARM * ROUND} frames, {end:.2f} at the end; resident memory "
            f"{grown:+.2f} since then"
        )
    assert end - warm < GROWTH_MIB
    assert grown < RESIDENT_MIB
    assert settled(threads) <= threads


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> w.Tensor:
    made = torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
    return w.Tensor(*tensor_bytes(made))


@pytest.fixture
def store(demo_store: Callable[[str], Any]) -> Any:
    return demo_store("float32")


@pytest.fixture
def hello(store: Any) -> w.Hello:
    return w.Hello(w.PROTOCOL_VERSION, store.manifest.model_digest, store.manifest.dtype, "main")


@pytest.fixture
def width(store: Any) -> int:
    return int(store.manifest.config["hidden_size"])


def to_worker(store: Any, hello: w.Hello, width: int) -> list[w.Message]:
    layers = store.manifest.moe_layers
    computes: list[w.Message] = [
        w.Compute(number, slot, layer, number % 3, tensor(1 + number, width), tensor(1 + number), number % 2 == 0)
        for number, (slot, layer) in enumerate([(0, layers[0]), (1, layers[1]), (2, layers[0]), (0, layers[-1])])
    ]
    loads: list[w.Message] = [
        w.Load(number, slot, layer, number % 3)
        for number, (slot, layer) in enumerate([(0, layers[0]), (1, layers[1]), (2, layers[0]), (0, layers[-1])])
    ]
    rest: list[w.Message] = [w.Evict(0), w.Evict(1), w.Evict(2), w.AskUsage(), w.AskTrace(), w.Echo(7), w.Beat(0)]
    bundle = w.Bundle(tuple(TO_WORKER.encode(message) for message in (w.Evict(0), loads[0], computes[0])))
    return [*computes, *loads, *rest, bundle]


def rounds_at_node(node: Node, role: Role, codec: Any, seeds: list[w.Message], hello: w.Hello) -> Callable[[int], int]:
    """Every other round without a Hello, while a healthy stream is open, which must not notice."""

    def run(number: int) -> int:
        if number % 2:
            return feed_node(node, role, Frames(codec, [*seeds, hello], number).take(ROUND), [hello])
        client = Client(node, hello)
        echoes = 0

        def echoing(frames: Iterator[bytes]) -> Iterator[bytes]:
            nonlocal echoes
            for at, data in enumerate(frames):
                if at % 100 == 0:
                    assert client.ask(w.Echo(at), answers=1) == [w.Echo(at)]
                    echoes += 1
                yield data

        streams = feed_node(node, role, echoing(Frames(codec, seeds, number).take(ROUND)), [])
        assert client.ends == [], "a healthy stream was cut"
        assert echoes == ROUND // 100
        client.channel.close()
        return streams

    return run


def test_a_worker(store: Any, hello: w.Hello, width: int, capsys: Any) -> None:
    worker = Worker(
        "worker 0",
        store,
        ExpertArithmetic(store.manifest.config, store.manifest.dtype),
        MemoryLoader(store),
        FormChoice(slots=SLOTS),
    )
    layer = store.manifest.moe_layers[0]
    found: dict[str, list[Any]] = {}

    def healthy() -> None:
        """Every slot loads and computes, and to the same bits as before."""
        client, outputs = Client(worker, hello), []
        for slot in range(SLOTS):
            rows = w.Compute(100 + slot, slot, layer, slot, tensor(3, width), tensor(3), True)
            answers = client.ask(w.Load(10 + slot, slot, layer, slot), rows, answers=2)
            [output] = [answer.output for answer in answers if isinstance(answer, w.Computed)]
            outputs.append(bytes(output.data))
        client.channel.close()
        assert outputs == found.setdefault("first", outputs)

    seeds = to_worker(store, hello, width)
    fuzz("worker", rounds_at_node(worker, "worker", TO_WORKER, seeds, hello), healthy, capsys)
    worker.close()


def test_a_host_place(store: Any, hello: w.Hello, width: int, capsys: Any) -> None:
    place = HostPlace("host", store, ExpertArithmetic(store.manifest.config, store.manifest.dtype))
    layer = store.manifest.moe_layers[0]
    found: dict[str, bytes] = {}

    def healthy() -> None:
        client = Client(place, hello)
        [answer] = client.ask(w.Compute(1, 0, layer, 2, tensor(3, width), tensor(3), False), answers=1)
        assert isinstance(answer, w.Computed)
        client.channel.close()
        output = bytes(answer.output.data)
        assert output == found.setdefault("first", output)

    seeds = to_worker(store, hello, width)
    fuzz("host place", rounds_at_node(place, "worker", TO_WORKER, seeds, hello), healthy, capsys)
    place.close()


def test_a_shadow(store: Any, hello: w.Hello, shadow_model: Any, reference: Any, capsys: Any) -> None:
    model = shadow_model("int8")
    shadow = Shadow("shadow", model, hello.fingerprint, hello.dtype)
    prompt = tuple(reference("float32", 0, 1).prompt)[:12]
    layers = len(store.manifest.moe_layers)
    found: dict[str, Any] = {}

    def healthy() -> None:
        """The first decode pass is predicted as before."""
        client = Client(shadow, hello)
        opened = w.OpenRequest(1, prompt, 0, 4, 0, 0, 1, True)
        predicted = client.ask(opened, w.Align(1, 0, None, 0, ()), answers=layers)
        client.channel.close()
        assert predicted == found.setdefault("first", predicted)

    cache = [tensor(1, 2, 2, 16) for _ in range(2 * layers)]
    seeds: list[w.Message] = [
        *(w.OpenRequest(number, prompt[: 3 + number], 0, 4, 1, 1, 2, number % 2 == 0) for number in range(3)),
        *(w.Align(number, step, 5, 3, tuple(cache)) for number in range(3) for step in range(2)),
        *(w.Align(number, 1, None, 3, (), more=True) for number in range(3)),
        *(w.CloseRequest(number) for number in range(3)),
        *(w.AskUsage(), w.AskTrace(), w.Echo(7), w.Beat(0)),
    ]
    fuzz("shadow", rounds_at_node(shadow, "shadow", TO_SHADOW, seeds, hello), healthy, capsys)
    shadow.close()


def test_a_main_node(store: Any, width: int, reference: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a worker and by a shadow, in turns. Each has a place among four good workers, and answers are under way."""
    monkeypatch.setattr(peer_module, "ECHOES", 1)
    cluster = TappedCluster(store, slots=2)
    engine, peers = cluster.engine, cluster.engine.peers
    expected = reference("float32", 3, TOKENS)
    layer = store.manifest.moe_layers[0]
    ready = w.WorkerReady(
        w.PROTOCOL_VERSION, "w", 2, store.manifest.blob_bytes, "cpu", "disk", "box", 7, "a processor", 1 << 33, 1e9
    )
    shadow_ready = w.ShadowReady(w.PROTOCOL_VERSION, "shadow", "nf4", 1000, "box", 7, "a processor", "cpu")
    spans = w.TraceRecords("m", 1.0, ("load",), ("1.2",), (0.0,), (1.0,), False)
    from_worker: list[w.Message] = [
        *(w.Loaded(number, 100, 0.01) for number in (1, 50, 400)),
        *(w.Computed(number, tensor(1, width), 0.01) for number in (1, 50, 400)),
        *(w.Failed("ValueError", "no", load_id=number) for number in (1, 400)),
        *(w.WorkerUsage(1, 100, 1, 100), spans, ready, w.Echo(3), w.Beat(0)),
    ]
    from_shadow: list[w.Message] = [
        *(w.Prediction(number, 12 + number, layer, (0, 1), (0.5, 0.5)) for number in range(6)),
        *(w.ShadowUsage(100), w.ShadowProgress(1, 0, False), spans, shadow_ready, w.Echo(3), w.Beat(0)),
    ]

    def healthy() -> None:
        peers.owed.clear()  # of a fuzzed worker that was not lost
        steps = [step.token_id for step in cluster.main.generate(list(expected.prompt), TOKENS, ignore_eos=True)]
        assert [token for token in steps if token is not None] == list(expected.tokens)
        assert sorted(peers.workers)[:4] == [0, 1, 2, 3], "a good worker was lost"
        cluster.forget()

    def answer() -> None:
        """While frames come: an answer, or an error that has a name."""
        try:
            for _ in cluster.main.generate(list(expected.prompt), TOKENS, ignore_eos=True):
                pass
        except ODMoEError:
            pass

    def run(number: int) -> int:
        role: Role = "shadow" if number % 2 else "worker"
        codec, seeds = (FROM_SHADOW, from_shadow) if number % 2 else (FROM_WORKER, from_worker)
        taken = 0

        def frames() -> Iterator[bytes]:
            nonlocal taken
            for data in Frames(codec, seeds, number).take(ROUND):
                taken += 1
                yield data

        peer = FuzzedPeer(role, shadow_ready if number % 2 else ready, frames(), 50)
        asking = threading.Thread(target=answer, daemon=True)
        asking.start()
        while taken < ROUND:
            try:
                if role == "worker":
                    peers.add_worker(9, peer.connect, WAIT_S)
                else:
                    peers.add_shadow(peer.connect, WAIT_S)
            except ODMoEError:  # its first frames came before it was used
                continue
        if 9 in peers.workers:
            peers.workers[9].on_close(None)
        if peers.shadow is not None:
            peers.shadow.on_close(None)
        asking.join(WAIT_S)
        assert not asking.is_alive(), "an answer hangs"
        return peer.streams

    try:
        fuzz("main node", run, healthy, capsys)
        assert engine.idle()
    finally:
        cluster.close()
