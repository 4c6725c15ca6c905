"""The engine with workers that fail, or talk nonsense."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest

from scheduler.errors import ProtocolError, RequestFailedError
from support.nodes import remote_stream
from support.nodes.engine_world import (
    HIDDEN,
    LAYERS,
    WAIT_S,
    Desk,
    Fake,
    Later,
    Say,
    computed,
    good,
    once,
    rows_of,
)
from wire import messages as w
from wire.base import Channel

pytestmark = pytest.mark.timeout(60)


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
    assert sorted(desk.engine.peers.workers) == [0, 1, 2]


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
    assert len(desk.engine.peers.workers) == workers  # the nodes are well


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
        w.Load,
        lambda fake, m: w.Computed(m.load_id, w.Tensor("float32", (1, HIDDEN), bytes(4 * HIDDEN)), 0.0),
    ),
    "a call that failed as a load": (w.Compute, lambda fake, m: w.Failed("X", "y", load_id=m.call_id)),
    "a prediction": (w.Compute, lambda fake, m: w.Prediction(1, 5, 0, (0,), (1.0,))),
    "a question": (w.Compute, lambda fake, m: w.AskUsage()),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_costs_the_worker_not_the_answer(name: str, desk: Desk, caplog: Any) -> None:
    fakes = desk.workers(once(*NONSENSE[name]), good)
    desk.open()
    desk.check(rows_of(1, experts=(0, 1)))
    assert sorted(desk.engine.peers.workers) == [1]
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
    assert sorted(desk.engine.peers.workers) == [1]


@pytest.mark.parametrize(
    "extra",
    [
        w.Computed(9_999, w.Tensor("float32", (1, HIDDEN), bytes(4 * HIDDEN)), 0.0),
        w.Loaded(9_999, 1, 0.0),
        w.Failed("X", "y", load_id=9_999),
        w.Failed("X", "y", call_id=9_999),
        w.WorkerUsage(1, 2, 3, 4),
    ],
)
def test_what_is_over_is_not_heard(extra: w.Message, desk: Desk) -> None:
    """Answers to what is not wanted any more cross with an Evict: they change nothing."""

    def act(fake: Fake, message: w.Compute) -> Say:
        fake.say(extra, computed(message), extra, computed(message))
        return None

    desk.workers(once(w.Compute, act, always=True), good)
    desk.open()
    for layer in LAYERS:
        desk.check(rows_of(layer), layer)
    assert sorted(desk.engine.peers.workers) == [0, 1]


def test_a_message_that_cannot_be_sent_fails_its_request_alone(desk: Desk) -> None:
    """The codec refuses what is larger than a message may be."""

    class Small:
        def __init__(self, inner: Channel) -> None:
            self.inner = inner

        def send(self, *messages: w.Message) -> None:
            if any(isinstance(message, w.Compute) and message.hidden.shape[0] > 4 for message in messages):
                raise ProtocolError("Compute.hidden.shape is (9, 8); allowed: at most 128 bytes; send it in parts")
            self.inner.send(*messages)

        def close(self) -> None:
            self.inner.close()

    for number in range(2):
        fake = desk.fake(good)
        desk.engine.peers.add_worker(
            number, lambda handler, fake=fake: Small(remote_stream.connect(fake, handler)), WAIT_S
        )
    desk.open(1)
    desk.open(2)
    with pytest.raises(RequestFailedError, match="send it in parts"):
        Later(lambda: desk.layer(rows_of(1, 9, (0, 1)))).result()
    desk.check(rows_of(1, 4), number=2)
    assert sorted(desk.engine.peers.workers) == [0, 1]
