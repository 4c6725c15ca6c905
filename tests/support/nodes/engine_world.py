"""A small world around the engine: nodes that do as they are told, and layers whose answers are known."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from checkpoint.kv import CachePiece, Growing
from checkpoint.tensors import tensor_bytes, tensor_from_bytes
from main_node.engine.engine import Engine, Waits
from main_node.engine.experts import RemoteExperts
from main_node.engine.sequence import Sequence
from main_node.request import Request
from scheduler import types as t
from scheduler.alignment import Alignment
from scheduler.core.groups import RoundRobin
from scheduler.core.machine import Core
from scheduler.errors import HandshakeError, ODMoEError
from support.nodes import remote_stream
from wire import messages as w
from wire.base import Channel, Handler
from wire.handshake import check_hello
from wire.serial import SerialThread

WAIT_S = 30.0
HIDDEN, EXPERTS, LAYERS = 8, 4, (0, 1, 2)
HELLO = w.Hello(w.PROTOCOL_VERSION, "abc", "float32", "main")
Say = w.Message | None


def arithmetic(layer: int, expert: int, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """An expert, for the tests: every row, layer and expert gives something else."""
    return torch.sin(hidden * (1 + expert + 10 * layer)) * weights[:, None]


def computed(message: w.Compute) -> w.Computed:
    hidden, weights = (tensor_from_bytes(x.dtype, x.shape, x.data) for x in (message.hidden, message.weights))
    output = arithmetic(message.layer, message.expert, hidden, weights)
    return w.Computed(message.call_id, w.Tensor(*tensor_bytes(output)), 0.0)


@dataclass(frozen=True)
class Rows:
    """What one MoE layer is asked, and the answer that it must have."""

    hidden: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor

    def expected(self, layer: int) -> torch.Tensor:
        result = torch.zeros_like(self.hidden)
        for expert in torch.unique(self.index).tolist():
            place, token = torch.where(self.index.T == expert)
            result.index_add_(0, token, arithmetic(layer, expert, self.hidden[token], self.weights[token, place]))
        return result


def rows_of(seed: int, count: int = 1, experts: tuple[int, ...] | None = None) -> Rows:
    """`experts`: what each row is routed to; two at random where not said."""
    made = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)
    index = torch.tensor([experts or rng.sample(range(EXPERTS), 2) for _ in range(count)])
    return Rows(torch.randn(count, HIDDEN, generator=made), index, torch.rand(index.shape, generator=made))


@dataclass
class Fake:
    """A worker or a shadow. `script` says what it answers to a message: a message, or None for silence.

    It answers on a thread of its own, one message after the other. `heard`: what it was told, Hello first; `handled`:
    of how many of them the answer has been sent, and taken by the engine.
    """

    script: Callable[[Fake, w.Message], Say]
    reply: Channel = field(init=False)
    heard: list[w.Message] = field(default_factory=list)
    handled: int = 0
    closed: threading.Event = field(default_factory=threading.Event)
    loads: dict[int, w.Load] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.changed = threading.Condition()
        self.errors: list[Exception] = []
        self.thread = SerialThread("fake", self.errors.append)

    def accept(self, reply: Channel) -> Handler:
        self.reply = reply
        return self

    def on_message(self, message: w.Message) -> None:
        with self.changed:
            self.heard.append(message)
            self.changed.notify_all()
        if isinstance(message, w.Load):
            assert message.slot not in self.loads, "loaded into a slot that is taken"
            self.loads[message.slot] = message
        elif isinstance(message, w.Evict):
            self.loads.pop(message.slot, None)
        elif isinstance(message, w.Compute):
            loaded = self.loads[message.slot]
            assert (loaded.layer, loaded.expert) == (message.layer, message.expert)
            if message.evict:
                del self.loads[message.slot]
        self.thread.submit(self._answer, message)

    def _answer(self, message: w.Message) -> None:
        try:
            answer = self.script(self, message)
            if answer is not None:
                self.say(answer)
        finally:
            self.handled += 1

    def say(self, *messages: w.Message) -> None:
        for message in messages:
            self.reply.send(message)

    def on_close(self, error: ODMoEError | None) -> None:
        self.closed.set()

    def of(self, kind: type) -> list[Any]:
        with self.changed:
            return [m for m in self.heard if isinstance(m, kind)]

    def wait(self, kind: type, count: int = 1) -> list[Any]:
        """Until it has heard so many of a kind."""
        with self.changed:
            found = self.changed.wait_for(lambda: sum(isinstance(m, kind) for m in self.heard) >= count, WAIT_S)
            assert found, f"{count} {kind.__name__} did not come: {self.heard}"
        return self.of(kind)

    def close(self) -> None:
        self.thread.close()


def worker_ready(slots: int) -> w.WorkerReady:
    return w.WorkerReady(
        w.PROTOCOL_VERSION, "worker", slots, 100, "cpu", "fake", "box", 42, "a processor", 1 << 30, 2e9
    )


def good(fake: Fake, message: w.Message) -> Say:
    """A worker with one slot as it should be."""
    if isinstance(message, w.Hello):
        try:
            check_hello(message, "worker", "abc", "float32")
        except HandshakeError as error:
            return w.Failed("HandshakeError", str(error))
        return worker_ready(1)
    if isinstance(message, w.Echo):
        return message
    if isinstance(message, w.Load):
        return w.Loaded(message.load_id, 100, 0.0)
    if isinstance(message, w.Compute):
        return computed(message)
    if isinstance(message, w.AskUsage):
        return w.WorkerUsage(1, 100, 2, 200)
    return None


def once(kind: Any, act: Callable[[Fake, Any], Say], always: bool = False) -> Callable[[Fake, w.Message], Say]:
    """As `good`, but the first message of a kind (or each of them) is answered by `act`."""
    done = threading.Event()

    def script(fake: Fake, message: w.Message) -> Say:
        if isinstance(message, kind) and (always or not done.is_set()):
            done.set()
            return act(fake, message)
        return good(fake, message)

    return script


def shadow(fake: Fake, message: w.Message) -> Say:
    if isinstance(message, w.Hello):
        return w.ShadowReady(w.PROTOCOL_VERSION, "shadow", "nf4", 5, "box", 43, "a processor", "cpu")
    if isinstance(message, w.Echo):
        return message
    return w.ShadowUsage(7) if isinstance(message, w.AskUsage) else None


class MadeUp(Sequence):
    """A request's tokens and KV rows, made up."""

    def __init__(self) -> None:
        super().__init__(list(range(100, 105)), 20, DynamicCache())

    def prompt_before(self, step: int) -> tuple[int, ...]:
        return tuple(range(100, 105 + step))

    def token_of(self, step: int) -> int:
        return 105 + step

    def kv_rows(self, start: int, stop: int, states: bool = True) -> CachePiece:
        rows = torch.arange(start, stop).float().reshape(1, 1, -1, 1).expand(1, 2, -1, 3)
        return CachePiece(start, stop, [Growing(rows, -2, start)] * 4)


def made_up(number: int) -> Request:
    """A request that never comes to choose a token."""
    return Request(number, MadeUp(), chooser=None)  # type: ignore[arg-type]


class Desk:
    """An engine, its fakes, and threads to wait for layers in. `answer_s`: how long the engine waits for a silent
    worker; much longer than any test."""

    def __init__(
        self,
        answer_s: float = 3600.0,
        mini_batch: int = 128,
        hello: w.Hello = HELLO,
        worker_wait_s: float = 0.0,
    ) -> None:
        shape = t.ModelShape(LAYERS, EXPERTS, 2, HIDDEN)
        self.core = Core(shape, RoundRobin(2), Alignment(), mini_batch)
        self.engine = Engine(self.core, hello, Waits(answer_s, worker_wait_s))
        self.experts = RemoteExperts(self.engine)
        self.fakes: list[Fake] = []

    def close(self) -> None:
        self.engine.close()
        for fake in self.fakes:
            fake.close()
            assert fake.closed.wait(WAIT_S)

    def settle(self) -> None:
        """Until no fake has anything to do. What is handled was counted before what was heard: then nothing is on the
        way either, unless another thread than the fakes' sends something."""
        end = time.monotonic() + WAIT_S
        while sum(fake.handled for fake in self.fakes) < sum(len(fake.heard) for fake in self.fakes):
            assert time.monotonic() < end, "a fake does not come to an end"
            time.sleep(0.0005)

    def fake(self, script: Callable[[Fake, w.Message], Say]) -> Fake:
        self.fakes.append(Fake(script))
        return self.fakes[-1]

    def workers(self, *scripts: Callable[[Fake, w.Message], Say]) -> list[Fake]:
        made = [self.fake(script) for script in scripts]
        for number, fake in enumerate(made):
            self.join(number, fake)
        return made

    def join(self, number: int, fake: Fake, deadline_s: float = WAIT_S) -> w.WorkerReady:
        return self.engine.peers.add_worker(number, lambda handler: remote_stream.connect(fake, handler), deadline_s)

    def shadow(self, script: Callable[[Fake, w.Message], Say] = shadow, deadline_s: float = WAIT_S) -> Fake:
        fake = self.fake(script)
        self.engine.peers.add_shadow(lambda handler: remote_stream.connect(fake, handler), deadline_s)
        return fake

    def open(self, number: int = 1, decode: bool = True) -> None:
        """A request whose prompt of five has been read; its first decode pass begins."""
        self.engine.open_request(made_up(number))
        if decode:
            self.engine.post(t.TokenDecoded(number, 0))
            self.engine.post(t.StepStarted((t.Pass(number, 5, 1, prefill=False),)))

    def layer(self, rows: Rows, layer: int = 0, number: int = 1, position: int = 5) -> torch.Tensor:
        return self.experts.compute(t.Visit(number, position, layer), rows.hidden, rows.index, rows.weights)

    def check(self, rows: Rows, layer: int = 0, number: int = 1, position: int = 5) -> None:
        """The layer's result is what it must be, in time."""
        got = Later(lambda: self.layer(rows, layer, number, position)).result()
        assert torch.equal(got, rows.expected(layer))


class Later:
    """A call on a thread of its own, which may not outlast its deadline."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            self._error = error

    def result(self, within: float = WAIT_S) -> Any:
        self._thread.join(within)
        assert not self._thread.is_alive(), f"still waiting after {within:g} s"
        if self._error is not None:
            raise self._error
        return self._result


def becomes_idle(engine: Engine) -> bool:
    """Soon: an audit may outlast its answer."""
    end = time.monotonic() + WAIT_S
    while not engine.idle() and time.monotonic() < end:
        time.sleep(0.01)
    return engine.idle()


def nothing_left(engine: Engine) -> bool:
    """No request, layer, load or call anywhere in the scheduler or the engine."""
    return becomes_idle(engine) and not engine.core.stats


def close(fake: Fake, message: w.Message) -> None:
    fake.reply.close()


def silent(fake: Fake, message: w.Message) -> None:
    return None
