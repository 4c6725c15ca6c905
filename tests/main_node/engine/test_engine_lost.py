"""The engine with workers that are lost, come late or come again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from main_node.engine import peers as peers_module
from scheduler import types as t
from scheduler.errors import LinkError, ODMoEError, RequestFailedError
from support.nodes import remote_stream
from support.nodes.engine_world import (
    LAYERS,
    WAIT_S,
    Desk,
    Fake,
    Later,
    Say,
    close,
    good,
    once,
    rows_of,
    shadow,
    silent,
    worker_ready,
)
from wire import messages as w
from wire.base import Channel, Handler

pytestmark = pytest.mark.timeout(60)


def test_lost_before_a_layer(desk: Desk) -> None:
    fakes = desk.workers(good, good, good)
    desk.open()
    fakes[0].reply.close()
    desk.check(rows_of(1))
    assert sorted(desk.engine.peers.workers) == desk.core.workers == [1, 2]
    assert not fakes[0].of(w.Compute)


@pytest.mark.parametrize("kind", [w.Load, w.Compute])
@pytest.mark.parametrize("prefill", [False, True])
def test_lost_during_a_layer(kind: type, prefill: bool, desk: Desk) -> None:
    desk.workers(once(kind, close), good, good)
    desk.open(decode=not prefill)
    if prefill:
        desk.engine.post(t.StepStarted((t.Pass(1, 0, 9, prefill=True),)))
    for layer in LAYERS:
        rows = rows_of(layer, 9) if prefill else rows_of(layer, experts=(0, 1))
        desk.check(rows, layer, position=0 if prefill else 5)
    assert sorted(desk.engine.peers.workers) == [1, 2]


def test_all_but_one_are_lost_one_after_the_other(desk: Desk) -> None:
    desk.workers(once(w.Compute, close), once(w.Load, close), once(w.Compute, close), good)
    desk.open(decode=False)
    desk.engine.post(t.StepStarted((t.Pass(1, 0, 9, prefill=True),)))
    for layer in LAYERS:
        desk.check(rows_of(layer, 9), layer, position=0)
    assert sorted(desk.engine.peers.workers) == [3]


@pytest.mark.parametrize("kind", [w.Load, w.Compute])
def test_the_last_worker_lost_fails_the_request_at_once(kind: type, desk: Desk) -> None:
    desk.workers(once(kind, close))
    desk.open()
    waiting = Later(lambda: desk.layer(rows_of(1)))
    with pytest.raises(RequestFailedError, match=r"request 1 failed: the last worker is gone: it closed its stream"):
        waiting.result()
    with pytest.raises(RequestFailedError):
        desk.layer(rows_of(1), 1)
    desk.engine.close_request(1)
    desk.open(2)
    with pytest.raises(RequestFailedError, match="request 2 failed: the last worker is gone: it closed its stream"):
        desk.layer(rows_of(1), number=2)
    desk.engine.close_request(2)
    desk.join(0, desk.fake(good))
    desk.open(3)
    desk.check(rows_of(2), number=3)


def test_a_node_that_fails_as_a_whole_is_lost(desk: Desk, caplog: Any) -> None:
    desk.workers(once(w.Compute, lambda fake, m: w.Failed("StoreError", "the disk is gone")), good)
    desk.open()
    desk.check(rows_of(1, experts=(0, 1)))
    assert sorted(desk.engine.peers.workers) == [1]
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
    assert sorted(desk.engine.peers.workers) == [0, 1]
    desk.check(rows_of(2, experts=(0, 1)), 1)
    assert second.of(w.Compute)


class HeardLater:
    """A peer's handler that hears of the end of its stream when the test says so, as it may over a network."""

    def __init__(self, handler: Handler) -> None:
        self.on_message, self.end = handler.on_message, handler.on_close

    def on_close(self, error: ODMoEError | None) -> None:
        pass


@pytest.mark.parametrize("role", ["worker", "shadow"])
def test_the_end_of_an_old_stream_may_be_heard_of_when_another_has_taken_over(role: str, desk: Desk) -> None:
    held: list[HeardLater] = []

    def to(fake: Fake) -> Callable[[Handler], Channel]:
        def connect(handler: Handler) -> Channel:
            held.append(HeardLater(handler))
            return remote_stream.connect(fake, held[-1])

        return connect

    for _ in range(2):
        if role == "worker":
            desk.engine.peers.add_worker(0, to(desk.fake(good)), WAIT_S)
        else:
            desk.engine.peers.add_shadow(to(desk.fake(shadow)), WAIT_S)
    held[0].end(None)
    assert desk.engine.peers.lost == ["worker 0" if role == "worker" else "shadow"]
    assert [fact.state for fact in desk.engine.peers.nodes()] == ["ready"]
    assert (0 in desk.engine.peers.workers) is (role == "worker")
    assert (desk.engine.peers.shadow is not None) is (role == "shadow")


def test_what_a_worker_says_of_itself_before_it_has_joined_is_heard_and_of_a_former_one_nothing(desk: Desk) -> None:
    """Between its answer to Hello and its last Echo."""

    def early(fake: Fake, message: w.Echo) -> Say:
        fake.say(w.Held(True, (0, 0, 2)), w.HostShrunk(1), w.Held(True, (0, 0, 1)))
        return message

    def of_core() -> list[t.Event]:
        return [event for event in events if isinstance(event, t.WorkerJoined | t.HoldingsChanged | t.HostMemoryShrunk)]

    events: list[t.Event] = []
    handle = desk.core.handle
    desk.core.handle = lambda event, now: (events.append(event), handle(event, now))[1]  # type: ignore[method-assign,func-returns-value]
    held: list[HeardLater] = []

    def to(handler: Handler) -> Channel:
        held.append(HeardLater(handler))
        return remote_stream.connect(desk.fake(once(w.Echo, early)), held[-1])

    desk.engine.peers.add_worker(0, to, WAIT_S)
    joined, *after = of_core()
    assert isinstance(joined, t.WorkerJoined)
    assert after == [t.HoldingsChanged(0, (t.HeldRange(0, 0, 1),)), t.HostMemoryShrunk(0, 1)]
    desk.join(0, desk.fake(good))
    events.clear()
    held[0].on_message(w.HostShrunk(0))
    assert of_core() == []


def test_a_node_that_flaps_for_long_fills_no_memory(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "NAMED", 3)
    desk.workers(good, good)
    for _ in range(5):
        desk.engine.peers.workers[0].on_close(None)
        desk.join(0, desk.fake(good))
    desk.engine.peers.workers[1].on_close(None)
    assert desk.engine.peers.lost == ["worker 0", "worker 0", "worker 1"]
    assert desk.engine.peers.rejoined == ["worker 0"] * 3


def test_whoever_is_lost_is_told_of_and_may_come_back(desk: Desk) -> None:
    told: list[tuple[str, int]] = []
    desk.engine.peers.on_lost = lambda kind, number: told.append((kind, number))
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
    assert desk.engine.peers.lost == ["worker 0", "shadow", "worker 1"]
    assert desk.engine.peers.rejoined == ["worker 0", "shadow"]
    lines = [
        "worker 0 is lost, 1 left: it closed its stream",
        "the shadow is lost, tokens take longer without its predictions: it closed its stream",
        "worker 0 is back",
        "the shadow is back",
        "worker 1 is lost, 1 left: it closed its stream",
    ]
    membership = desk.engine.peers.membership
    assert [membership.since(0), membership.since(3)] == [(5, lines), (5, lines[3:])]
    assert membership.since(None) == membership.since(9) == (5, [])  # 9: another main node's number
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
        desk.engine.peers.add_worker(0, lambda handler: Slow(remote_stream.connect(fake, handler), fake), WAIT_S)
    assert desk.engine.peers.workers == {}
    assert desk.core.workers == []


class Slow:
    """Sends, and comes back only when the peer has closed."""

    def __init__(self, inner: Channel, fake: Fake) -> None:
        self.inner, self.fake = inner, fake

    def send(self, *messages: w.Message) -> None:
        self.inner.send(*messages)
        assert self.fake.closed.wait(WAIT_S)

    def close(self) -> None:
        self.inner.close()


def test_a_layer_that_nobody_works_on_does_not_wait_for_ever(desk_of: Any, monkeypatch: Any) -> None:
    """A scheduler that has forgotten it: an error with a name, not a hang."""
    desk = desk_of(answer_s=0.1)
    desk.workers(good)
    desk.open()
    monkeypatch.setattr(desk.core, "handle", lambda event, now: [])
    with pytest.raises(RequestFailedError, match=r"layer 0 at position 5 has waited for 0\.1 s and no worker"):
        Later(lambda: desk.layer(rows_of(1))).result()
