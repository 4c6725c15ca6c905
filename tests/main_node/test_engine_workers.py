"""The engine with workers that are lost, silent, fail, or talk nonsense."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from scheduler import types as t
from scheduler.errors import (
    LinkError,
    ProtocolError,
    RequestFailedError,
)
from support.engine_world import (
    HIDDEN,
    LAYERS,
    WAIT_S,
    Desk,
    Fake,
    Later,
    Say,
    close,
    computed,
    good,
    once,
    rows_of,
    silent,
    worker_ready,
)
from wire import inprocess
from wire import messages as w
from wire.base import Channel

pytestmark = pytest.mark.timeout(60)


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


def test_whoever_is_lost_is_told_of_and_may_come_back(desk: Desk) -> None:
    told: list[tuple[str, int]] = []
    desk.engine.on_lost = lambda kind, number: told.append((kind, number))
    fakes = desk.workers(good, once(w.Compute, close))
    following = desk.shadow()
    desk.open()
    fakes[0].reply.close()
    following.reply.close()
    assert told == [("worker", 0), ("shadow", 0)]
    desk.join(0, desk.fake(good))
    desk.shadow()
    desk.check(rows_of(1, experts=(0, 1)))
    assert told == [("worker", 0), ("shadow", 0), ("worker", 1)]
    assert desk.engine.lost == ["worker 0", "shadow", "worker 1"]
    assert desk.engine.rejoined == ["worker 0", "shadow"]
    desk.engine.close()
    assert len(told) == 3
    with pytest.raises(LinkError, match="the main node was closed"):
        desk.join(1, desk.fake(good))


def test_one_that_goes_between_ready_and_use_is_not_used(desk: Desk) -> None:
    """Its stream ends behind its first word."""

    def brief(fake: Fake, message: w.Message) -> Say:
        fake.say(worker_ready(1))
        fake.reply.close()
        return None

    fake = desk.fake(once(w.Hello, brief))
    with pytest.raises(LinkError, match="worker 0 was ready, but its stream has ended"):
        desk.engine.add_worker(0, lambda handler: Slow(inprocess.connect(fake, handler), fake), WAIT_S)
    assert desk.engine.workers == {}
    assert desk.core.workers == []


class Slow:
    """Sends, and comes back only when the peer has closed."""

    def __init__(self, inner: Channel, fake: Fake) -> None:
        self.inner, self.fake = inner, fake

    def send(self, message: w.Message) -> None:
        self.inner.send(message)
        assert self.fake.closed.wait(WAIT_S)

    def close(self) -> None:
        self.inner.close()


def test_a_worker_is_waited_for(desk: Desk) -> None:
    assert not desk.engine.wait_for_worker(0.05)
    waiting = Later(lambda: desk.engine.wait_for_worker(WAIT_S))
    desk.workers(good)
    assert waiting.result()
    assert waiting.seconds < 5


def test_a_layer_that_nobody_works_on_does_not_wait_for_ever(desk_of: Any, monkeypatch: Any) -> None:
    """A scheduler that has forgotten it: an error with a name, not a hang."""
    desk = desk_of(answer_s=0.3)
    desk.workers(good)
    desk.open()
    monkeypatch.setattr(desk.core, "handle", lambda event, now: [])
    with pytest.raises(RequestFailedError, match=r"layer 0 at position 5 has waited for 0\.3 s and no worker"):
        Later(lambda: desk.layer(rows_of(1))).result()


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
