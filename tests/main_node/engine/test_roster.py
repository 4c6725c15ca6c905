"""What the main node knows of its nodes: what they said, what was measured, whether they are there."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from main_node.engine import peer
from main_node.engine.roster import kind_of
from scheduler.errors import ProtocolError
from support.nodes.engine_world import (
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


def with_slots(slots: int) -> Any:
    def script(fake: Fake, message: w.Message) -> Say:
        return worker_ready(slots) if isinstance(message, w.Hello) else good(fake, message)

    return script


def test_every_node_in_its_own_words(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "ECHO_S", WAIT_S)
    desk.workers(with_slots(1), with_slots(3))
    desk.shadow()
    first, second, third = desk.engine.peers.nodes()
    assert (first.role, first.number, first.state, first.slots) == ("worker", 0, "ready", 1)
    assert second == replace(first, number=1, slots=3, round_trip_s=second.round_trip_s)
    assert (first.host, first.pid, first.device, first.device_bytes) == ("box", 42, "a processor", 1 << 30)
    assert (first.loader, first.slot_bytes, first.load_bytes_per_s, first.loads) == ("fake", 100, 2e9, 0)
    assert (third.role, third.number, third.pid, third.scheme) == ("shadow", 0, 43, "nf4")
    assert (third.loader, third.slots, third.load_bytes_per_s, third.loads) == (None, None, None, None)
    assert all(node.round_trip_s > 0 for node in (first, second, third))
    assert (first.sent_bytes, first.received_bytes) == (None, None), "in memory nothing is encoded"
    told = json.loads(json.dumps([asdict(node) for node in desk.engine.peers.nodes()]))
    assert told[1]["slots"] == 3


def test_memory_that_is_not_known_is_no_figure(desk: Desk) -> None:
    ready = replace(worker_ready(1), device="xpu:0", device_bytes=0)
    desk.workers(once(w.Hello, lambda fake, m: ready, always=True))
    assert desk.engine.peers.nodes()[0].device_bytes is None


def test_each_role_names_its_device(desk: Desk) -> None:
    def on(device: str, model: str) -> Any:
        ready = replace(worker_ready(1), device=device, device_name=model)
        return once(w.Hello, lambda fake, m: ready, always=True)

    def its_shadow(fake: Fake, message: w.Message) -> Say:
        found = shadow(fake, message)
        return replace(found, device="cuda:1", device_name="a card") if isinstance(found, w.ShadowReady) else found

    desk.workers(on("cuda:0", "a card"), on("cpu", "a processor"))
    desk.shadow(its_shadow)
    assert desk.engine.peers.roster.devices() == {
        "workers": ["cuda:0 (a card)", "cpu (a processor)"],
        "shadow": "cuda:1 (a card)",
    }


@pytest.mark.parametrize(
    ("devices", "kinds"),
    [
        (["cuda:0 (NVIDIA H200)", "cuda:1 (NVIDIA H200)"], 1),
        (["cuda:0 (NVIDIA H200)", "cuda:0 (NVIDIA GeForce RTX 3090)"], 2),
        (["cuda:0 (a card)", "xpu:0 (a card)"], 2),
        (["cpu (a processor)", "cuda:0 (a card)"], 2),
        (["cpu (a processor)", "cpu (another)"], 1),
    ],
)
def test_accelerators_of_one_model_are_of_one_kind(devices: list[str], kinds: int, desk: Desk) -> None:
    """A report is exact where there is one."""
    assert len({kind_of(device) for device in devices}) == kinds

    def on(device: str) -> Any:
        name, _, model = device.partition(" ")
        ready = replace(worker_ready(1), device=name, device_name=model[1:-1])
        return once(w.Hello, lambda fake, m: ready, always=True)

    desk.workers(*map(on, devices))
    assert desk.engine.peers.roster.kinds() == {kind_of(device) for device in devices}


def test_a_round_trip_is_the_best_of_a_few(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the node moves, while it answers."""
    clock = SimpleNamespace(at=100.0)

    def takes_a_while(fake: Fake, message: w.Echo) -> w.Message:
        clock.at += {1: 0.06, 2: 0.04, 3: 0.01, 4: 0.05, 5: 0.07}[message.number]
        return message

    monkeypatch.setattr(peer, "runtime", SimpleNamespace(monotonic=lambda: clock.at, Condition=threading.Condition))
    monkeypatch.setattr(peer, "ECHO_S", WAIT_S)
    worker, *_ = desk.workers(once(w.Echo, takes_a_while, always=True))
    assert [echo.number for echo in worker.of(w.Echo)] == [1, 2, 3, 4, 5]
    assert desk.engine.peers.nodes()[0].round_trip_s == pytest.approx(0.01)


def test_a_node_that_keeps_a_profiles_times_joins_no_main_node_that_does_not(desk: Desk) -> None:
    """At once, and not when its patience ends."""
    fake = desk.fake(once(w.Hello, lambda fake, m: w.Stamped(1.0, 1.0, "a machine", worker_ready(1))))
    with pytest.raises(ProtocolError, match="worker 0 keeps a profile's times, the main node does not"):
        Later(lambda: desk.join(0, fake, deadline_s=3600.0)).result()
    assert desk.engine.peers.nodes() == []


def test_a_node_that_does_not_echo_joins_all_the_same(desk: Desk, virtual_time: Any) -> None:
    time = virtual_time(desk)
    wrong = once(w.Echo, lambda fake, m: w.Echo(m.number + 1), always=True)
    late = once(w.Echo, silent)  # the second would be answered: it is not asked
    workers = desk.workers(once(w.Echo, silent, always=True), late, wrong)
    assert [node.round_trip_s for node in desk.engine.peers.nodes()] == [None] * 3
    assert [len(fake.of(w.Echo)) for fake in workers] == [1, 1, 1]
    assert time.now == pytest.approx(1000 + 2 * peer.ECHO_S)
    desk.open()
    desk.check(rows_of(1))


def test_loads_are_counted_and_a_lost_node_stays_in_the_list(desk: Desk) -> None:
    first, _ = desk.workers(good, good)
    desk.shadow()
    desk.open()
    desk.check(rows_of(1, experts=(0, 1)))
    desk.check(rows_of(2, experts=(2, 3)), layer=1)
    loads = [node.loads for node in desk.engine.peers.nodes()]
    assert loads == [2, 2, None]
    close(first, w.AskUsage())
    desk.engine.peers.shadow.close()
    assert [node.state for node in desk.engine.peers.nodes()] == ["lost", "ready", "lost"]
    desk.join(0, desk.fake(good))
    desk.shadow(shadow)
    back = desk.engine.peers.nodes()
    assert [node.state for node in back] == ["ready"] * 3
    assert back[0].loads == 2, "counted since the main node started"
