"""The engine with nodes that do as they are told: layers, closing, many threads, handshakes, usage."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from scheduler import types as t
from scheduler.errors import (
    ClusterError,
    DeadlineError,
    HandshakeError,
    LinkError,
    RequestFailedError,
)
from support.nodes.engine_world import (
    EXPERTS,
    LAYERS,
    WAIT_S,
    Desk,
    Fake,
    Later,
    Say,
    close,
    good,
    made_up,
    nothing_left,
    once,
    rows_of,
    shadow,
    silent,
)
from support.nodes.virtual_time import VirtualTime
from wire import inprocess
from wire import messages as w

pytestmark = pytest.mark.timeout(60)


# --- a layer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("mini_batch", [1, 3, 128])
def test_layers_are_computed(workers: int, mini_batch: int, desk_of: Any) -> None:
    desk = desk_of(mini_batch=mini_batch)
    desk.workers(*[good] * workers)
    desk.open(decode=False)
    desk.engine.post(t.StepStarted((t.Pass(1, 0, 6, prefill=True),)))
    for layer in LAYERS:
        desk.check(rows_of(layer, 6), layer, position=0)
    for index in range(3):
        desk.engine.post(t.TokenDecoded(1, index))
        desk.engine.post(t.StepStarted((t.Pass(1, 5 + index, 1, prefill=False),)))
        for layer in LAYERS:
            desk.check(rows_of(9 * index + layer), layer, position=5 + index)
    stats = desk.core.stats[1]
    assert stats.loads == sum(len(f.of(w.Load)) for f in desk.fakes)
    assert stats.loads - stats.decode_loads == EXPERTS * len(LAYERS)
    assert stats.reloads == stats.decode_loads == 3 * 2 * len(LAYERS)


# --- closing ----------------------------------------------------------------------------------------------------


def test_a_request_closed_while_its_layer_waits(desk: Desk) -> None:
    fakes = desk.workers(once(w.Compute, silent))
    desk.open()
    waiting = Later(lambda: desk.layer(rows_of(1)))
    fakes[0].wait(w.Compute)
    desk.engine.close_request(1)
    with pytest.raises(RequestFailedError, match="request 1 was closed"):
        waiting.result()
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
    assert all(fake.closed.is_set() for fake in fakes)
    desk.engine.close()


# --- many threads -----------------------------------------------------------------------------------------------


def test_a_request_that_cannot_be_opened_is_not_kept(desk: Desk, monkeypatch: Any) -> None:
    handle = desk.core.handle

    def failing(event: t.Event, now: float) -> list[t.Command]:
        if isinstance(event, t.RequestOpened):
            raise KeyError("a defect")
        return handle(event, now)

    monkeypatch.setattr(desk.core, "handle", failing)
    with pytest.raises(KeyError, match="a defect"), desk.engine.serving(made_up(1)):
        pass
    assert desk.engine.idle()


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
        desk.engine.open_request(made_up(number))
        for index in range(6):
            desk.engine.post(t.TokenDecoded(number, index))
            desk.engine.post(t.StepStarted((t.Pass(number, 5 + index, 1, prefill=False),)))
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
            told.say(w.Prediction(number, position, layer, experts, (0.5, 0.5)))

    threads = [Later(lambda n=n: request(n)) for n in range(1, 9)] + [Later(lambda n=n: predict(n)) for n in range(2)]
    for thread in threads:
        thread.result()
    assert sorted(map(id, handled)) == sorted(map(id, posted))
    assert len(told.of(w.OpenRequest)) == len(told.of(w.CloseRequest)) == 8
    assert len(told.of(w.Align)) == 8 * 6
    assert all(fake.errors == [] for fake in desk.fakes)
    assert nothing_left(desk.engine)


# --- handshakes and usage ---------------------------------------------------------------------------------------

HANDSHAKES: list[tuple[Callable[[Fake, Any], Say], type, str]] = [
    (lambda fake, m: w.Failed("HandshakeError", "worker has model fingerprint xyz"), HandshakeError, "fingerprint xyz"),
    (lambda fake, m: w.Failed("NoSuchError", "what"), ClusterError, "NoSuchError: what"),
    (silent, DeadlineError, "did not answer within"),
    (close, LinkError, "closed its stream"),
]


@pytest.mark.parametrize(("act", "error", "named"), HANDSHAKES)
def test_a_handshake_that_fails_is_named(act: Any, error: type, named: str, desk: Desk) -> None:
    worker, false_shadow = desk.fake(once(w.Hello, act)), desk.fake(once(w.Hello, act))
    with pytest.raises(error, match=named):
        desk.join(0, worker, 0.1 if act is silent else WAIT_S)
    with pytest.raises(ClusterError):
        desk.engine.peers.add_shadow(
            lambda handler: inprocess.connect(false_shadow, handler), 0.1 if act is silent else WAIT_S
        )
    for fake in (worker, false_shadow):
        assert fake.closed.wait(WAIT_S) or act is not silent
        fake.reply.close()
    assert desk.engine.peers.workers == {}
    assert desk.engine.peers.shadow is None
    assert desk.core.workers == []


def test_a_model_of_another_fingerprint_is_refused(desk_of: Any) -> None:
    desk = desk_of(hello=w.Hello(w.PROTOCOL_VERSION, "other", "float32", "main"))
    fake = desk.fake(good)
    with pytest.raises(HandshakeError, match="worker has model fingerprint abc, main has other"):
        desk.join(0, fake)
    assert fake.closed.wait(WAIT_S)


def test_a_node_of_the_other_kind_is_refused_and_let_go(desk: Desk) -> None:
    worker, other = desk.fake(good), desk.fake(shadow)
    with pytest.raises(ClusterError, match="address of a worker"):
        desk.join(0, other)
    with pytest.raises(ClusterError, match="address of a shadow"):
        desk.engine.peers.add_shadow(lambda handler: inprocess.connect(worker, handler), WAIT_S)
    assert worker.closed.is_set()
    assert other.closed.is_set()


def test_usage_leaves_out_who_does_not_answer(desk: Desk, virtual_time: Callable[[Desk], VirtualTime]) -> None:
    time = virtual_time(desk)
    quiet = once(w.AskUsage, silent, always=True)
    desk.workers(good, quiet, quiet, good, quiet)
    desk.shadow()
    began = time.now
    workers, held = Later(lambda: desk.engine.peers.usage(0.4)).result()
    assert workers == {0: w.WorkerUsage(1, 100, 2, 200), 3: w.WorkerUsage(1, 100, 2, 200)}
    assert held == w.ShadowUsage(7)
    assert time.now - began == pytest.approx(0.4), "together, not each"
    assert sorted(desk.engine.peers.workers) == [0, 1, 2, 3, 4]


def test_usage_of_a_worker_that_closes_meanwhile(desk: Desk) -> None:
    desk.workers(once(w.AskUsage, close), good)
    workers, held = Later(lambda: desk.engine.peers.usage(2 * WAIT_S)).result()
    assert sorted(workers) == [1]
    assert held is None
