"""The engine with nodes that do as they are told: answer, keep silent, fail, close, or talk nonsense."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from checkpoint.tensors import tensor_bytes, tensor_from_bytes
from main_node import sequence
from main_node.engine import Engine
from main_node.sequence import Sequence, align_messages
from scheduler import types as t
from scheduler.alignment import Alignment
from scheduler.core import Core
from scheduler.errors import (
    ClusterError,
    DeadlineError,
    HandshakeError,
    LinkError,
    ODMoEError,
    ProtocolError,
    RequestFailedError,
)
from scheduler.placement import RoundRobin
from wire import inprocess
from wire import messages as w
from wire.base import Channel, Handler
from wire.handshake import check_hello
from wire.serial import SerialThread

pytestmark = pytest.mark.timeout(60)

WAIT_S = 15.0
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

    It answers on a thread of its own, one message after the other. `heard`: what it was told, Hello first.
    """

    script: Callable[[Fake, w.Message], Say]
    reply: Channel = field(init=False)
    heard: list[w.Message] = field(default_factory=list)
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
        answer = self.script(self, message)
        if answer is not None:
            self.say(answer)

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


def good(fake: Fake, message: w.Message) -> Say:
    """A worker with one slot as it should be."""
    if isinstance(message, w.Hello):
        try:
            check_hello(message, "worker", "abc", "float32")
        except HandshakeError as error:
            return w.Failed("HandshakeError", str(error))
        return w.WorkerReady(w.PROTOCOL_VERSION, "worker", 1, 100, "cpu", "fake")
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
        return w.ShadowReady(w.PROTOCOL_VERSION, "shadow", "nf4", 5)
    return w.ShadowUsage(7) if isinstance(message, w.AskUsage) else None


class Data:
    """A request's tokens and KV rows, made up."""

    max_new_tokens = 20

    def prompt_before(self, step: int) -> tuple[int, ...]:
        return tuple(range(100, 105 + step))

    def token_of(self, step: int) -> int:
        return 105 + step

    def kv_rows(self, start: int, stop: int) -> list[torch.Tensor]:
        return [torch.arange(start, stop).float().reshape(1, 1, -1, 1).expand(1, 2, -1, 3) for _ in range(4)]


class Desk:
    """An engine, its fakes, and threads to wait for layers in."""

    def __init__(self, answer_s: float, mini_batch: int = 128) -> None:
        shape = t.ModelShape(LAYERS, EXPERTS, 2, HIDDEN)
        self.core = Core(shape, RoundRobin(2), Alignment(), mini_batch)
        self.engine = Engine(self.core, HELLO, answer_s)
        self.fakes: list[Fake] = []

    def fake(self, script: Callable[[Fake, w.Message], Say]) -> Fake:
        self.fakes.append(Fake(script))
        return self.fakes[-1]

    def workers(self, *scripts: Callable[[Fake, w.Message], Say]) -> list[Fake]:
        made = [self.fake(script) for script in scripts]
        for number, fake in enumerate(made):
            self.join(number, fake)
        return made

    def join(self, number: int, fake: Fake, deadline_s: float = WAIT_S) -> w.WorkerReady:
        return self.engine.add_worker(number, lambda handler: inprocess.connect(fake, handler), deadline_s)

    def shadow(self, script: Callable[[Fake, w.Message], Say] = shadow, deadline_s: float = WAIT_S) -> Fake:
        fake = self.fake(script)
        self.engine.add_shadow(lambda handler: inprocess.connect(fake, handler), deadline_s)
        return fake

    def open(self, number: int = 1, decode: bool = True) -> None:
        """A request whose prompt of five has been read; its first decode pass begins."""
        self.engine.open_request(number, Data(), 5)
        if decode:
            self.engine.post(t.TokenDecoded(number, 0))
            self.engine.post(t.PassStarted(number, 5, 1, prefill=False))

    def layer(self, rows: Rows, layer: int = 0, number: int = 1, position: int = 5) -> torch.Tensor:
        return self.engine.experts(t.Visit(number, position, layer), rows.hidden, rows.index, rows.weights)

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
        self.began = time.monotonic()
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            self._error = error
        self.seconds = time.monotonic() - self.began

    def result(self, within: float = WAIT_S) -> Any:
        self._thread.join(within)
        assert not self._thread.is_alive(), f"still waiting after {within:g} s"
        if self._error is not None:
            raise self._error
        return self._result


@pytest.fixture
def desk_of() -> Iterator[Callable[..., Desk]]:
    made: list[Desk] = []

    def build(answer_s: float = 30.0, **settings: Any) -> Desk:
        made.append(Desk(answer_s, **settings))
        return made[-1]

    yield build
    for desk in made:
        desk.engine.close()
        for fake in desk.fakes:
            fake.close()
            assert fake.closed.wait(WAIT_S)


@pytest.fixture
def desk(desk_of: Callable[..., Desk]) -> Desk:
    return desk_of()


def close(fake: Fake, message: w.Message) -> None:
    fake.reply.close()


def silent(fake: Fake, message: w.Message) -> None:
    return None


# --- a layer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("mini_batch", [1, 3, 128])
def test_layers_are_computed(workers: int, mini_batch: int, desk_of: Any) -> None:
    desk = desk_of(mini_batch=mini_batch)
    desk.workers(*[good] * workers)
    desk.open(decode=False)
    desk.engine.post(t.PassStarted(1, 0, 6, prefill=True))
    for layer in LAYERS:
        desk.check(rows_of(layer, 6), layer, position=0)
    for index in range(3):
        desk.engine.post(t.TokenDecoded(1, index))
        desk.engine.post(t.PassStarted(1, 5 + index, 1, prefill=False))
        for layer in LAYERS:
            desk.check(rows_of(9 * index + layer), layer, position=5 + index)
    ledger = desk.core.ledgers[1]
    assert ledger.loads == sum(len(f.of(w.Load)) for f in desk.fakes)
    assert ledger.loads - ledger.decode_loads == EXPERTS * len(LAYERS)
    assert ledger.reloads == ledger.decode_loads == 3 * 2 * len(LAYERS)


# --- lost workers -----------------------------------------------------------------------------------------------


def test_lost_before_a_layer(desk: Desk) -> None:
    fakes = desk.workers(good, good, good)
    desk.open()
    fakes[0].reply.close()
    desk.check(rows_of(1))
    assert sorted(desk.engine.workers) == desk.core.workers == [1, 2]
    assert not fakes[0].of(w.Compute)


@pytest.mark.parametrize("kind", [w.Load, w.Compute])
@pytest.mark.parametrize("prefill", [False, True])
def test_lost_during_a_layer(kind: type, prefill: bool, desk: Desk) -> None:
    desk.workers(once(kind, close), good, good)
    desk.open(decode=not prefill)
    if prefill:
        desk.engine.post(t.PassStarted(1, 0, 9, prefill=True))
    for layer in LAYERS:
        rows = rows_of(layer, 9) if prefill else rows_of(layer, experts=(0, 1))
        desk.check(rows, layer, position=0 if prefill else 5)
    assert sorted(desk.engine.workers) == [1, 2]


def test_all_but_one_are_lost_one_after_the_other(desk: Desk) -> None:
    desk.workers(once(w.Compute, close), once(w.Load, close), once(w.Compute, close), good)
    desk.open(decode=False)
    desk.engine.post(t.PassStarted(1, 0, 9, prefill=True))
    for layer in LAYERS:
        desk.check(rows_of(layer, 9), layer, position=0)
    assert sorted(desk.engine.workers) == [3]


@pytest.mark.parametrize("kind", [w.Load, w.Compute])
def test_the_last_worker_lost_fails_the_request_at_once(kind: type, desk: Desk) -> None:
    desk.workers(once(kind, close))
    desk.open()
    waiting = Later(lambda: desk.layer(rows_of(1)))
    with pytest.raises(RequestFailedError, match=r"request 1 failed: the last worker is gone: it closed its stream"):
        waiting.result()
    assert waiting.seconds < 5  # of 30
    with pytest.raises(RequestFailedError):
        desk.layer(rows_of(1), 1)
    desk.engine.close_request(1)
    desk.open(2)
    with pytest.raises(RequestFailedError, match="no worker is connected"):
        desk.layer(rows_of(1), number=2)
    desk.engine.close_request(2)
    desk.join(0, desk.fake(good))
    desk.open(3)
    desk.check(rows_of(2), number=3)


def test_a_node_that_fails_as_a_whole_is_lost(desk: Desk, caplog: Any) -> None:
    desk.workers(once(w.Compute, lambda fake, m: w.Failed("StoreError", "the disk is gone")), good)
    desk.open()
    desk.check(rows_of(1, experts=(0, 1)))
    assert sorted(desk.engine.workers) == [1]
    assert "worker 0 is lost: StoreError: the disk is gone" in caplog.text


def test_a_number_that_comes_again_takes_over(desk: Desk) -> None:
    first, _ = desk.workers(once(w.Compute, silent, always=True), good)
    desk.open()
    waiting = Later(lambda: desk.layer(rows_of(1, experts=(0, 1))))
    first.wait(w.Compute)
    second = desk.fake(good)
    desk.join(0, second)
    assert torch.equal(waiting.result(), rows_of(1, experts=(0, 1)).expected(0))
    assert first.closed.is_set()
    assert sorted(desk.engine.workers) == [0, 1]
    desk.check(rows_of(2, experts=(0, 1)), 1)
    assert second.of(w.Compute)


# --- silent workers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [w.Load | w.Compute, w.Compute])
def test_a_silent_worker_is_dropped(kind: Any, desk_of: Any, caplog: Any) -> None:
    desk = desk_of(answer_s=0.3)
    fakes = desk.workers(once(kind, silent, always=True), good, good)
    desk.open()
    for layer in LAYERS:
        desk.check(rows_of(layer, experts=(0, 1)), layer)
    assert sorted(desk.engine.workers) == [1, 2]
    assert fakes[0].closed.wait(WAIT_S)
    assert "worker 0 has not answered for 0.3 s" in caplog.text


def test_the_last_worker_silent_fails_the_request(desk_of: Any) -> None:
    desk = desk_of(answer_s=0.3)
    desk.workers(once(w.Compute, silent), once(w.Compute, silent))
    desk.open()
    waiting = Later(lambda: desk.layer(rows_of(1)))
    with pytest.raises(RequestFailedError, match=r"has not answered for 0\.3 s"):
        waiting.result()
    assert waiting.seconds < 5


def test_an_evicted_load_is_not_owed(desk_of: Any) -> None:
    """A load that was given up is never answered; its worker is well, and stays when another keeps silent."""
    desk = desk_of(answer_s=0.4)
    # Layer 0 of position 5 is turn 15, so its group is workers 2 and 3; layer 1's is 0 and 1.
    fakes = desk.workers(once(w.Compute, silent), good, good, once(w.Load, silent))
    desk.shadow()
    desk.open()
    desk.engine.post(t.Predicted(1, 5, 0, (2, 3)))
    fakes[3].wait(w.Load)
    desk.check(rows_of(1, experts=(0, 1)), 0)
    assert fakes[3].of(w.Evict)
    desk.check(rows_of(2, experts=(0, 1)), 1)
    assert sorted(desk.engine.workers) == [1, 2, 3]


def test_a_worker_asked_late_has_its_time(desk_of: Any) -> None:
    """What it is given shortly before another one's deadline is due a whole `answer_s` later."""
    desk = desk_of(answer_s=1.0)

    def lost_late(fake: Fake, message: w.Message) -> Say:
        threading.Timer(0.8, fake.reply.close).start()
        return None

    def slow(fake: Fake, message: w.Load) -> Say:
        threading.Timer(0.6, fake.say, (w.Loaded(message.load_id, 100, 0.6),)).start()
        return None

    # Position 5, layer 0 is turn 15: of three workers the ring begins with worker 0.
    def computes(fake: Fake, message: w.Compute) -> Say:
        threading.Timer(0.7, fake.say, (computed(message),)).start()
        return None

    def both(fake: Fake, message: w.Message) -> Say:
        return slow(fake, message) if isinstance(message, w.Load) else computes(fake, message)

    desk.workers(once(w.Compute, lost_late), *[once(w.Load | w.Compute, both, always=True)] * 2)
    desk.open()
    desk.check(rows_of(1, experts=(0,)))
    assert sorted(desk.engine.workers) == [1, 2]


def test_chatter_is_no_answer(desk_of: Any) -> None:
    """A worker that talks of what nobody asked is as silent as one that says nothing."""
    desk = desk_of(answer_s=0.3)
    stop = threading.Event()

    def chatter(fake: Fake, message: w.Message) -> Say:
        while not stop.wait(0.02) and not fake.closed.is_set():
            fake.say(w.Loaded(9_999, 1, 0.0), computed(w.Compute(9_998, *message_of(message), False)))
        return None

    desk.workers(once(w.Compute, chatter), good)
    desk.open()
    desk.check(rows_of(1, experts=(0, 1)))
    stop.set()
    assert sorted(desk.engine.workers) == [1]


def message_of(message: Any) -> tuple[Any, ...]:
    return message.slot, message.layer, message.expert, message.hidden, message.weights


# --- failures and nonsense --------------------------------------------------------------------------------------


def load_failed(fake: Fake, message: w.Load) -> Say:
    return w.Failed("CorruptStoreError", "the disk is worn", load_id=message.load_id)


def compute_failed(fake: Fake, message: w.Compute) -> Say:
    return w.Failed("RuntimeError", "no memory", call_id=message.call_id)


@pytest.mark.parametrize(("kind", "fail"), [(w.Load, load_failed), (w.Compute, compute_failed)])
def test_a_failure_is_retried_elsewhere(kind: type, fail: Any, desk: Desk) -> None:
    desk.workers(once(kind, fail, always=True), good, good)
    desk.open()
    for layer in LAYERS:
        desk.check(rows_of(layer, experts=(0, 1)), layer)
    assert sorted(desk.engine.workers) == [0, 1, 2]


@pytest.mark.parametrize(
    ("kind", "fail", "cause"),
    [(w.Load, load_failed, "CorruptStoreError: the disk is worn"), (w.Compute, compute_failed, "RuntimeError: no mem")],
)
@pytest.mark.parametrize("workers", [1, 3])
def test_failing_everywhere_fails_the_request(kind: type, fail: Any, cause: str, workers: int, desk: Desk) -> None:
    desk.workers(*[once(kind, fail, always=True)] * workers)
    desk.open()
    with pytest.raises(RequestFailedError, match=cause):
        Later(lambda: desk.layer(rows_of(1))).result()
    assert len(desk.engine.workers) == workers  # the nodes are well


def output_of(shape: tuple[int, ...], dtype: str = "float32", short: int = 0) -> Callable[[Fake, Any], Say]:
    def act(fake: Fake, message: w.Compute) -> Say:
        size = math.prod(shape) * w.DTYPE_BYTES.get(dtype, 8) - short
        return w.Computed(message.call_id, w.Tensor(dtype, shape, bytes(size)), 0.0)

    return act


NONSENSE: dict[str, tuple[type, Callable[[Fake, Any], Say]]] = {
    "no rows": (w.Compute, output_of((0, HIDDEN))),
    "too many rows": (w.Compute, output_of((3, HIDDEN))),
    "flat": (w.Compute, output_of((HIDDEN,))),
    "narrow": (w.Compute, output_of((1, 1))),
    "wide": (w.Compute, output_of((1, 2 * HIDDEN))),
    "half precision": (w.Compute, output_of((1, HIDDEN), "float16")),
    "integers": (w.Compute, output_of((1, HIDDEN), "int32")),
    "unknown dtype": (w.Compute, output_of((1, HIDDEN), "float64")),
    "short bytes": (w.Compute, output_of((1, HIDDEN), short=4)),
    "no bytes": (w.Compute, output_of((1, HIDDEN), short=4 * HIDDEN)),
    "a call answered as a load": (w.Compute, lambda fake, m: w.Loaded(m.call_id, 1, 0.0)),
    "a load answered as a call": (
        w.Load, lambda fake, m: w.Computed(m.load_id, w.Tensor("float32", (1, HIDDEN), bytes(4 * HIDDEN)), 0.0),
    ),
    "a call that failed as a load": (w.Compute, lambda fake, m: w.Failed("X", "y", load_id=m.call_id)),
    "a prediction": (w.Compute, lambda fake, m: w.Prediction(1, 5, 0, (0,), (1.0,))),
    "a question": (w.Compute, lambda fake, m: w.AskUsage()),
}  # fmt: skip


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_costs_the_worker_not_the_answer(name: str, desk: Desk, caplog: Any) -> None:
    fakes = desk.workers(once(*NONSENSE[name]), good)
    desk.open()
    desk.check(rows_of(1, experts=(0, 1)))
    assert sorted(desk.engine.workers) == [1]
    assert fakes[0].closed.wait(WAIT_S)
    assert "worker 0 is lost: " in caplog.text
    desk.check(rows_of(2), 1)


@pytest.mark.parametrize("name", ["narrow", "a call answered as a load"])
def test_nonsense_of_the_last_worker_is_named(name: str, desk: Desk) -> None:
    desk.workers(once(*NONSENSE[name]))
    desk.open()
    with pytest.raises(RequestFailedError, match=r"the last worker is gone: .*(shape|number)"):
        Later(lambda: desk.layer(rows_of(1))).result()


def test_another_ones_call_is_not_its_to_answer(desk: Desk) -> None:
    """Worker 0 answers worker 1's call, with rows that would fit."""
    asked: list[w.Compute] = []
    ready = threading.Event()

    def note(fake: Fake, message: w.Compute) -> Say:
        asked.append(message)
        ready.set()
        return None

    def steal(fake: Fake, message: w.Compute) -> Say:
        assert ready.wait(WAIT_S)
        wrong = w.Tensor("float32", (1, HIDDEN), bytes(4 * HIDDEN))
        fake.say(w.Computed(asked[0].call_id, wrong, 0.0))
        desk.fakes[1].say(computed(asked[0]))
        return None

    desk.workers(once(w.Compute, steal), once(w.Compute, note))
    desk.open()
    desk.check(rows_of(1, experts=(0, 1)))
    assert sorted(desk.engine.workers) == [1]


@pytest.mark.parametrize("extra", [
    w.Computed(9_999, w.Tensor("float32", (1, HIDDEN), bytes(4 * HIDDEN)), 0.0), w.Loaded(9_999, 1, 0.0),
    w.Failed("X", "y", load_id=9_999), w.Failed("X", "y", call_id=9_999), w.WorkerUsage(1, 2, 3, 4),
])  # fmt: skip
def test_what_is_over_is_not_heard(extra: w.Message, desk: Desk) -> None:
    """Answers to what is not wanted any more cross with an Evict: they change nothing."""

    def act(fake: Fake, message: w.Compute) -> Say:
        fake.say(extra, computed(message), extra, computed(message))
        return None

    desk.workers(once(w.Compute, act, always=True), good)
    desk.open()
    for layer in LAYERS:
        desk.check(rows_of(layer), layer)
    assert sorted(desk.engine.workers) == [0, 1]


def test_a_message_that_cannot_be_sent_fails_its_request_alone(desk: Desk) -> None:
    """The codec refuses what is larger than a message may be."""

    class Small:
        def __init__(self, inner: Channel) -> None:
            self.inner = inner

        def send(self, message: w.Message) -> None:
            if isinstance(message, w.Compute) and message.hidden.shape[0] > 4:
                raise ProtocolError("Compute.hidden.shape is (9, 8); allowed: at most 128 bytes; send it in parts")
            self.inner.send(message)

        def close(self) -> None:
            self.inner.close()

    for number in range(2):
        fake = desk.fake(good)
        desk.engine.add_worker(number, lambda handler, fake=fake: Small(inprocess.connect(fake, handler)), WAIT_S)
    desk.open(1)
    desk.open(2)
    with pytest.raises(RequestFailedError, match="send it in parts"):
        Later(lambda: desk.layer(rows_of(1, 9, (0, 1)))).result()
    desk.check(rows_of(1, 4), number=2)
    assert sorted(desk.engine.workers) == [0, 1]


# --- closing ----------------------------------------------------------------------------------------------------


def test_a_request_closed_while_its_layer_waits(desk: Desk) -> None:
    fakes = desk.workers(once(w.Compute, silent))
    desk.open()
    waiting = Later(lambda: desk.layer(rows_of(1)))
    fakes[0].wait(w.Compute)
    desk.engine.close_request(1)
    with pytest.raises(RequestFailedError, match="request 1 was closed"):
        waiting.result()
    assert waiting.seconds < 5
    with pytest.raises(RequestFailedError, match="request 1 was closed"):
        desk.layer(rows_of(1), 1)
    desk.open(2)
    desk.check(rows_of(2), number=2)


def test_the_engine_closed_while_a_layer_waits(desk: Desk) -> None:
    fakes = desk.workers(once(w.Compute, silent), good)
    desk.open()
    waiting = Later(lambda: desk.layer(rows_of(1, experts=(0, 1))))
    fakes[0].wait(w.Compute)
    desk.engine.close()
    with pytest.raises(RequestFailedError, match="the main node was closed"):
        waiting.result()
    assert waiting.seconds < 5
    assert all(fake.closed.is_set() for fake in fakes)
    desk.engine.close()


# --- many threads -----------------------------------------------------------------------------------------------


def test_threads_lose_no_event(desk: Desk, monkeypatch: Any) -> None:
    """Eight requests on eight threads, predictions from two more; each layer right, each event handled once."""
    desk.workers(*[good] * 3)
    told = desk.shadow()
    inside, handled, posted = threading.Semaphore(1), [], []
    handle, post = desk.core.handle, desk.engine.post

    def counted(event: t.Event, now: float) -> list[t.Command]:
        assert inside.acquire(blocking=False), "two events at once"
        try:
            handled.append(event)
            return handle(event, now)
        finally:
            inside.release()

    def noted(event: t.Event) -> None:
        posted.append(event)
        post(event)

    monkeypatch.setattr(desk.core, "handle", counted)
    monkeypatch.setattr(desk.engine, "post", noted)

    def request(number: int) -> None:
        desk.engine.open_request(number, Data(), 5)
        for index in range(6):
            desk.engine.post(t.TokenDecoded(number, index))
            desk.engine.post(t.PassStarted(number, 5 + index, 1, prefill=False))
            for layer in LAYERS:
                rows = rows_of(1000 * number + 10 * index + layer)
                got = desk.layer(rows, layer, number, 5 + index)
                assert torch.equal(got, rows.expected(layer)), (number, index, layer)
        desk.engine.close_request(number)

    def predict(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(150):
            experts = tuple(rng.sample(range(EXPERTS), 2))
            number, position, layer = rng.randint(1, 8), rng.randint(5, 10), rng.choice(LAYERS)
            desk.engine._from_shadow(desk.engine.shadow, w.Prediction(number, position, layer, experts, (0.5, 0.5)))

    threads = [Later(lambda n=n: request(n)) for n in range(1, 9)] + [Later(lambda n=n: predict(n)) for n in range(2)]
    for thread in threads:
        thread.result(40)
    assert sorted(map(id, handled)) == sorted(map(id, posted))
    assert len(told.of(w.OpenRequest)) == len(told.of(w.CloseRequest)) == 8
    assert len(told.of(w.Align)) == 8 * 6
    assert all(fake.errors == [] for fake in desk.fakes)
    assert desk.engine._owed == {}


# --- the shadow -------------------------------------------------------------------------------------------------


def shadow_parts(aligns: list[w.Align]) -> list[tuple[int, int | None, int, int]]:
    return [(m.step, m.token, m.kv_start, m.kv[0].shape[2] if m.kv else 0) for m in aligns]


def test_the_shadow_is_told(desk: Desk) -> None:
    desk.workers(good)
    told = desk.shadow()
    desk.open()
    desk.engine.post(t.TokenDecoded(1, 1))
    desk.engine.close_request(1)
    opened = told.wait(w.OpenRequest)
    assert opened == [w.OpenRequest(1, (100, 101, 102, 103, 104), 0, 20, 1, 1, 2)]
    assert shadow_parts(told.wait(w.Align, 2)) == [(0, 105, 0, 5), (1, 106, 5, 1)]
    assert told.wait(w.CloseRequest) == [w.CloseRequest(1)]


def test_a_shadow_that_joins_late_takes_up_the_request(desk: Desk) -> None:
    desk.workers(good)
    desk.open()
    desk.engine.post(t.TokenDecoded(1, 1))
    desk.engine.post(t.PassStarted(1, 6, 1, prefill=False))
    told = desk.shadow()
    assert told.wait(w.OpenRequest) == [w.OpenRequest(1, (100, 101, 102, 103, 104, 105), 1, 20, 1, 1, 2)]
    assert shadow_parts(told.wait(w.Align)) == [(1, 106, 0, 6)]
    told.say(w.Prediction(1, 6, 0, (0, 1), (0.6, 0.4)))
    desk.check(rows_of(1, experts=(0, 1)), 0, position=6)
    ledger = desk.core.ledgers[1]
    assert (ledger.overall.correct, ledger.overall.activated, ledger.reloads) == (2, 2, 0)
    desk.engine.post(t.TokenDecoded(1, 2))
    assert shadow_parts(told.wait(w.Align, 2))[1] == (2, 107, 6, 1)


SHADOW_ENDS: dict[str, Callable[[Fake], None]] = {
    "closes": lambda fake: fake.reply.close(),
    "fails": lambda fake: fake.say(w.Failed("RuntimeError", "no memory")),
    "fails a request": lambda fake: fake.say(w.Failed("RuntimeError", "no memory", request=1)),
    "unknown layer": lambda fake: fake.say(w.Prediction(1, 5, 7, (0,), (1.0,))),
    "unknown expert": lambda fake: fake.say(w.Prediction(1, 5, 1, (0, EXPERTS), (0.5, 0.5))),
    "negative expert": lambda fake: fake.say(w.Prediction(1, 5, 1, (0, -1), (0.5, 0.5))),
    "out of turn": lambda fake: fake.say(w.Loaded(1, 1, 0.0)),
}


@pytest.mark.parametrize("name", SHADOW_ENDS)
def test_without_the_shadow_the_request_goes_on(name: str, desk: Desk, caplog: Any) -> None:
    desk.workers(good, good)
    told = desk.shadow()
    desk.open()
    told.say(w.Prediction(1, 5, 0, (0, 1), (0.6, 0.4)))
    desk.check(rows_of(1, experts=(0, 1)), 0)
    SHADOW_ENDS[name](told)
    assert desk.engine.shadow is None
    assert told.closed.wait(WAIT_S)
    assert "the shadow is lost, going on without predictions: " in caplog.text
    for layer in (1, 2):
        desk.check(rows_of(layer), layer)
    desk.engine.post(t.TokenDecoded(1, 1))
    assert desk.engine.wait_for_predictions(1, WAIT_S)
    again = desk.shadow()
    assert again.wait(w.OpenRequest)[0].first_step == 1
    assert desk.engine.shadow is not None


def test_wrong_predictions_cost_only_time(desk: Desk) -> None:
    desk.workers(good, good)
    told = desk.shadow()
    desk.open()
    told.say(
        w.Prediction(99, 5, 0, (0, 1), (0.5, 0.5)), w.Prediction(1, 5, 0, (2, 3), (0.5, 0.5)),
        w.Prediction(1, 5, 0, (2, 2), (0.5, 0.5)), w.Prediction(1, 5, 1, (), ()),
        w.Prediction(1, 500, 2, (1, 3), (0.5, 0.5)), w.Prediction(1, 0, 2, (1, 3), (0.5, 0.5)),
    )  # fmt: skip
    for layer in LAYERS:
        desk.check(rows_of(layer, experts=(0, 1)), layer)
    assert desk.engine.shadow is not None
    desk.engine.close_request(1)


def test_predictions_are_waited_for_within_a_deadline(desk: Desk) -> None:
    desk.workers(good)
    told = desk.shadow()
    desk.open()
    desk.check(rows_of(1, experts=(0, 1)))
    assert not desk.engine.wait_for_predictions(1, 0.05)
    waiting = Later(lambda: desk.engine.wait_for_predictions(1, WAIT_S))
    told.say(w.Prediction(1, 5, 0, (0, 3), (0.6, 0.4)))
    assert waiting.result()
    assert desk.core.ledgers[1].overall.recall == 0.5


# --- handshakes and usage ---------------------------------------------------------------------------------------

HANDSHAKES: list[tuple[Callable[[Fake, Any], Say], type, str]] = [
    (lambda fake, m: w.Failed("HandshakeError", "worker has model fingerprint xyz"), HandshakeError, "fingerprint xyz"),
    (lambda fake, m: w.Failed("NoSuchError", "what"), ClusterError, "NoSuchError: what"),
    (silent, DeadlineError, "did not answer within"),
    (close, LinkError, "closed its stream"),
    (lambda fake, m: w.WorkerReady(1, "w", 0, 1, "cpu", "fake"), ClusterError, "slots=0"),
]


@pytest.mark.parametrize(("act", "error", "named"), HANDSHAKES)
def test_a_handshake_that_fails_is_named(act: Any, error: type, named: str, desk: Desk) -> None:
    worker, false_shadow = desk.fake(once(w.Hello, act)), desk.fake(once(w.Hello, act))
    with pytest.raises(error, match=named):
        desk.join(0, worker, 0.3)
    with pytest.raises(ClusterError):
        desk.engine.add_shadow(lambda handler: inprocess.connect(false_shadow, handler), 0.3)
    for fake in (worker, false_shadow):
        assert fake.closed.wait(WAIT_S) or act is not silent
        fake.reply.close()
    assert desk.engine.workers == {}
    assert desk.engine.shadow is None
    assert desk.core.workers == []


def test_a_model_of_another_fingerprint_is_refused(desk_of: Any) -> None:
    desk = desk_of()
    desk.engine._hello = w.Hello(w.PROTOCOL_VERSION, "other", "float32", "main")
    fake = desk.fake(good)
    with pytest.raises(HandshakeError, match="worker has model fingerprint abc, main has other"):
        desk.join(0, fake)
    assert fake.closed.wait(WAIT_S)


def test_a_node_of_the_other_kind_is_refused_and_let_go(desk: Desk) -> None:
    worker, other = desk.fake(good), desk.fake(shadow)
    with pytest.raises(ClusterError, match="address of a worker"):
        desk.join(0, other)
    with pytest.raises(ClusterError, match="address of a shadow"):
        desk.engine.add_shadow(lambda handler: inprocess.connect(worker, handler), WAIT_S)
    assert worker.closed.is_set()
    assert other.closed.is_set()


def test_usage_leaves_out_who_does_not_answer(desk: Desk) -> None:
    quiet = once(w.AskUsage, silent, always=True)
    desk.workers(good, quiet, quiet, good, quiet)
    desk.shadow()
    asked = Later(lambda: desk.engine.usage(0.4))
    workers, held = asked.result()
    assert workers == {0: w.WorkerUsage(1, 100, 2, 200), 3: w.WorkerUsage(1, 100, 2, 200)}
    assert held == w.ShadowUsage(7)
    assert 0.4 <= asked.seconds < 1.5  # together, not each
    assert sorted(desk.engine.workers) == [0, 1, 2, 3, 4]


def test_usage_of_a_worker_that_closes_meanwhile(desk: Desk) -> None:
    desk.workers(once(w.AskUsage, close), good)
    workers, held = Later(lambda: desk.engine.usage(WAIT_S)).result(5)
    assert sorted(workers) == [1]
    assert held is None


# --- alignment messages -----------------------------------------------------------------------------------------


def kv(count: int, layers: int = 3) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(count)
    return [torch.randn(1, 2, count, 4, generator=made) for _ in range(2 * layers)]


@pytest.mark.parametrize("count", [1, 2, 7, 20])
@pytest.mark.parametrize("part_rows", [1, 3, 7, 100])
def test_alignment_parts_add_up(count: int, part_rows: int, monkeypatch: Any) -> None:
    rows = kv(count)
    row_bytes = 6 * 2 * 4 * 4
    monkeypatch.setattr(sequence, "ALIGN_PART_BYTES", part_rows * row_bytes + 5)
    messages = align_messages(t.Align(4, 9, True, 30, 30 + count), 77, rows)
    assert len(messages) == -(-count // part_rows)
    assert [m.more for m in messages] == [True] * (len(messages) - 1) + [False]
    assert {(m.request, m.step, m.token) for m in messages} == {(4, 9, 77)}
    at = 30
    for message in messages:
        assert message.kv_start == at
        at += message.kv[0].shape[2]
        assert sum(len(part.data) for part in message.kv) <= max(part_rows, 1) * row_bytes
    assert at == 30 + count
    for number, whole in enumerate(rows):
        parts = [tensor_from_bytes(m.kv[number].dtype, m.kv[number].shape, m.kv[number].data) for m in messages]
        assert torch.equal(torch.cat(parts, 2), whole)


def test_a_row_larger_than_a_part_travels_alone(monkeypatch: Any) -> None:
    monkeypatch.setattr(sequence, "ALIGN_PART_BYTES", 1)
    assert len(align_messages(t.Align(4, 9, True, 0, 5), 77, kv(5))) == 5


def test_an_alignment_without_rows_is_one_message() -> None:
    assert align_messages(t.Align(4, 9, False, 30, 30), None, []) == [w.Align(4, 9, None, 30, ())]


def test_a_sequence_tells_its_rows_and_tokens() -> None:
    from transformers import DynamicCache

    cache = DynamicCache()
    keys, values = kv(6, 1)
    cache.update(keys, values, 0)
    told = Sequence([1, 2, 3], 9, cache)
    told.tokens += [4, 5]
    assert told.prompt_before(1) == (1, 2, 3, 4)
    assert told.token_of(1) == 5
    assert [r.shape[2] for r in told.kv_rows(2, 5)] == [3, 3]
    assert torch.equal(told.kv_rows(2, 5)[1], values[:, :, 2:5])
    assert told.kv_rows(4, 4) == []
    assert told.cache_bytes() == keys.nbytes + values.nbytes
