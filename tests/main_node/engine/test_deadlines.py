"""How time is counted while workers are missing and while the shadow owes predictions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from main_node.engine import deadlines as module
from main_node.engine.deadlines import LOOK_S, Deadlines
from scheduler import types as t

JOINED = t.WorkerJoined(0, 1, 0.0, 0.0, 0.0, ())


class World:
    """In the place of the engine and of the clock. Time passes with each look, as drawn."""

    def __init__(self) -> None:
        self.core: Any = SimpleNamespace(shortfall=None, stats={}, progress=0, awaits_experts=False)
        self.posted: list[t.Event] = []
        self.lost: list[str] = []
        self.banned: set[int] = set()
        self.peers: Any = SimpleNamespace(
            shadow="shadow",
            lose_shadow=lambda peer, error: self.lost.append(str(error)),
            banned_workers=lambda: self.banned,
        )
        self.now = 0.0
        self.looks: Iterator[float] = iter(())

    def post(self, event: t.Event) -> None:
        self.posted.append(event)

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        """In the place of `Event.wait`: the next look. True, the end, after the last one."""
        passed = next(self.looks, None)
        self.now += passed or 0.0
        return passed is None

    @property
    def reasons(self) -> list[str]:
        return [event.reason for event in self.posted if isinstance(event, t.WorkerWaitExpired)]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    clock = SimpleNamespace(monotonic=made.monotonic, Event=threading.Event, current_thread=threading.current_thread)
    monkeypatch.setattr(module, "runtime", clock)
    return made


@pytest.fixture
def deadlines(world: World) -> Deadlines:
    made = Deadlines(world, threading.RLock(), worker_wait_s=2.0, shadow_s=1.0)
    made._closed = SimpleNamespace(wait=world.wait, is_set=lambda: False)  # type: ignore[assignment]
    made._thread = threading.current_thread()  # the looks are made by `look`
    made.on_handled(t.RequestOpened(1, 5), 0.0, [])
    return made


def look(world: World, deadlines: Deadlines, seconds: float, each: float = LOOK_S) -> None:
    """So many seconds pass, with a look after each part of them."""
    world.looks = iter([each] * round(seconds / each))
    deadlines._run()


def lose(world: World, deadlines: Deadlines, worker: int = 0) -> None:
    world.core.shortfall = "the last worker is gone: cable"
    deadlines.on_handled(t.WorkerLost(worker, "cable"), 0.0, [])


def test_requests_wait_for_so_long_and_no_longer(world: World, deadlines: Deadlines) -> None:
    lose(world, deadlines, 3)
    lose(world, deadlines, 0)
    look(world, deadlines, 1.5)
    assert world.posted == []
    assert deadlines.waited_s == pytest.approx(1.5)
    look(world, deadlines, 0.7)
    assert world.reasons == [
        "the last worker is gone: cable; worker 0, worker 3 did not come back within 2 s: start them again, or wait "
        "longer with --worker-wait"
    ]


def test_one_that_comes_back_ends_the_wait(world: World, deadlines: Deadlines) -> None:
    lose(world, deadlines)
    look(world, deadlines, 1.5)
    world.core.shortfall = None
    deadlines.on_handled(JOINED, 0.0, [])
    lose(world, deadlines)
    look(world, deadlines, 1.5)
    assert world.posted == []


def test_one_that_comes_back_and_is_lost_again_does_not_while_a_layer_waits(world: World, deadlines: Deadlines) -> None:
    world.core.awaits_experts = True
    for _ in range(5):
        lose(world, deadlines)
        look(world, deadlines, 0.5)
        world.core.shortfall = None
        deadlines.on_handled(JOINED, 0.0, [])
    assert world.reasons == [
        "the last worker is gone: cable; worker 0 did not come back within 2 s or was lost again (lost meanwhile: "
        "worker 0 4 times): start it again, or wait longer with --worker-wait"
    ]


def test_what_a_layer_gets_begins_the_wait_anew(world: World, deadlines: Deadlines) -> None:
    world.core.awaits_experts = True
    for _ in range(5):
        lose(world, deadlines)
        look(world, deadlines, 1.0)
        world.core.shortfall = None
        deadlines.on_handled(JOINED, 0.0, [])
        world.core.progress += 1
    assert world.posted == []


def test_a_layer_that_gets_nothing_ends_its_request_though_workers_are_there(
    world: World, deadlines: Deadlines
) -> None:
    deadlines.answer_s = 1.0
    world.core.awaits_experts = True
    deadlines.on_handled(t.WorkerLost(1, "cable"), 0.0, [])
    look(world, deadlines, 4.8)
    world.core.progress += 1
    look(world, deadlines, 4.8)
    assert world.posted == []
    deadlines.on_handled(t.WorkerLost(1, "cable"), 0.0, [])
    look(world, deadlines, 0.4)
    assert world.posted == [
        t.RequestsStalled(
            "its layer waits for experts, and for 5 s none was loaded or computed (lost meanwhile: worker 1 1 time); "
            "look into the workers' logs"
        )
    ]


def test_a_main_node_that_computes_is_not_stalled(world: World, deadlines: Deadlines) -> None:
    look(world, deadlines, deadlines.stall_s + 10)
    assert world.posted == []


def test_workers_that_are_not_taken_back_are_not_waited_for(world: World, deadlines: Deadlines) -> None:
    world.banned = {0, 1}
    world.core.shortfall = None
    deadlines.on_handled(t.WorkerLost(1, "lie"), 0.0, [])
    assert world.posted == []
    lose(world, deadlines, 0)
    assert world.reasons == [
        "the last worker is gone: cable; worker 0, worker 1 gave wrong outputs and are not taken back: check those "
        "machines, and restart the workers"
    ]


def test_one_that_is_not_enough_does_not(world: World, deadlines: Deadlines) -> None:
    lose(world, deadlines, 0)
    lose(world, deadlines, 1)
    look(world, deadlines, 1.5)
    world.core.shortfall = "all experts stay: 8 slots are needed, there are 4"
    deadlines.on_handled(JOINED, 0.0, [])
    look(world, deadlines, 0.7)
    assert world.reasons == [
        "all experts stay: 8 slots are needed, there are 4; worker 1 did not come back within 2 s: start it again, or "
        "wait longer with --worker-wait"
    ]


def test_a_process_that_was_stopped_has_not_waited(world: World, deadlines: Deadlines) -> None:
    lose(world, deadlines)
    look(world, deadlines, 1000.0, each=250.0)
    assert world.posted == []
    assert deadlines.waited_s == pytest.approx(4 * 2 * LOOK_S)


def test_without_a_request_nobody_waits(world: World, deadlines: Deadlines) -> None:
    lose(world, deadlines)
    look(world, deadlines, 1.5)
    deadlines.on_handled(t.RequestClosed(1), 0.0, [])
    look(world, deadlines, 1.0)
    deadlines.on_handled(t.RequestOpened(2, 5), 0.0, [])
    look(world, deadlines, 1.5)
    assert world.posted == []
    assert deadlines.waited_s == pytest.approx(3.0)


def test_no_wait_at_all(world: World, deadlines: Deadlines) -> None:
    deadlines.worker_wait_s = 0.0
    lose(world, deadlines)
    deadlines.on_handled(t.RequestOpened(2, 5), 0.0, [])
    assert world.reasons == ["the last worker is gone: cable"] * 2


def owe(world: World, layers: int) -> None:
    world.core.stats = {1: SimpleNamespace(unmatched_count=layers)}


def test_a_shadow_that_owes_and_sends_nothing_is_lost(world: World, deadlines: Deadlines) -> None:
    look(world, deadlines, 5.0)  # it owes nothing
    owe(world, 3)
    look(world, deadlines, 0.8)
    assert world.lost == []
    look(world, deadlines, 0.4)
    assert world.lost == ["it owes the predictions of 3 layers and has sent none for 1 s"]


def test_one_that_sends_something_is_only_late(world: World, deadlines: Deadlines) -> None:
    owe(world, 30)
    for _ in range(10):
        look(world, deadlines, 0.8)
        deadlines.on_handled(t.Predicted(1, 5, 0, (1, 2)), 0.0, [])
    assert world.lost == []


def test_what_it_owed_of_several_requests_adds_up(world: World, deadlines: Deadlines) -> None:
    """Answers that are shorter than the deadline hide no silence."""
    for _ in range(3):
        owe(world, 3)
        look(world, deadlines, 0.4)
        owe(world, 0)
        look(world, deadlines, 3.0)
    assert len(world.lost) == 1


def test_it_has_the_time_to_read_a_long_prompt(world: World, deadlines: Deadlines) -> None:
    world.now += 10.0
    deadlines.on_handled(t.TokenDecoded(1, 0), 0.0, [])
    owe(world, 3)
    look(world, deadlines, 20.8)
    assert world.lost == []
    look(world, deadlines, 0.4)
    assert len(world.lost) == 1


def test_without_a_shadow_none_is_lost(world: World, deadlines: Deadlines) -> None:
    world.peers.shadow = None
    owe(world, 3)
    look(world, deadlines, 5.0)
    assert world.lost == []


def test_the_thread_ends_when_no_request_is_open(world: World, deadlines: Deadlines) -> None:
    deadlines.on_handled(t.RequestClosed(1), 0.0, [])
    look(world, deadlines, module.IDLE_S + 1.0)
    assert deadlines._thread is None


def test_an_error_at_every_look_is_logged_once(
    world: World, deadlines: Deadlines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(passed_s: float) -> None:
        raise RuntimeError("no time")

    monkeypatch.setattr(deadlines, "_check_workers", fails)
    look(world, deadlines, 20 * LOOK_S)
    assert [repr(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["RuntimeError('no time')"]
