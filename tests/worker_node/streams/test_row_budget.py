"""Rows that wait at a worker are bounded in bytes; a main node that sends more all the same loses its stream."""

from __future__ import annotations

from typing import Any

import pytest

import worker_node.session
from support.nodes.held import HeldLoader
from support.nodes.worker_desk import Expected, MainEnd, WorkerDesk
from wire.credit import RowBudget
from wire.messages import Evict, Failed, Load, Loaded, WorkerReady
from worker_node.host import HostPlace

MOST = 6000
"""Room for four computations of three rows."""


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_node.session, "RowBudget", lambda: RowBudget(MOST))


def sent_until_it_ends(main: MainEnd, messages: list[Any]) -> int:
    """How many were sent before the stream ended."""
    for count, message in enumerate(messages):
        if main.ends:
            return count
        main.send(message)
    return len(messages)


def refusal(main: MainEnd) -> str:
    answer = main.next()
    assert isinstance(answer, Failed), answer
    assert (answer.error, answer.call_id) == ("ProtocolError", 0), "the stream failed, not one call"
    return answer.message


def test_a_flood_ends_the_stream_and_no_other(desk: WorkerDesk, held_loader: HeldLoader, expected: Expected) -> None:
    worker = desk.worker(1, held_loader)
    gate = held_loader.hold(0, 0)
    main = desk.connect(worker)
    main.send(desk.hello())
    ready = main.next()
    assert isinstance(ready, WorkerReady)
    assert ready.queue_bytes == MOST
    main.send(Load(1, 0, 0, 0))  # which does not end: everything waits for it
    assert sent_until_it_ends(main, [desk.compute(call, 0, 0, 0) for call in range(2, 20)]) == 5
    assert "exceed the 6000 bytes that may wait here" in refusal(main)
    gate.open()
    desk.welcome(worker).loads_and_computes(1, desk.compute(2, 0, 0, 1), expected)


def test_an_eviction_makes_room(desk: WorkerDesk, held_loader: HeldLoader, expected: Expected) -> None:
    main = desk.welcome(desk.worker(1, held_loader))
    gate = held_loader.hold(0, 0)
    for number in range(5):
        main.send(Load(number, 0, 0, 0), *(desk.compute(10 * number + call, 0, 0, 0) for call in range(1, 5)))
        main.send(Evict(0))
    gate.open()
    main.loads_and_computes(100, desk.compute(101, 0, 0, 0), expected)


def test_answers_make_room(desk: WorkerDesk, expected: Expected) -> None:
    main = desk.welcome(desk.worker(1))
    main.send(Load(1, 0, 0, 0))
    assert isinstance(main.next(), Loaded)
    for call in range(2, 40):
        asked = desk.compute(call, 0, 0, 0, evict=False)
        main.send(asked)
        assert expected.fits(main.next(), asked)


def test_a_host_place_is_bounded_likewise(desk: WorkerDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    place = HostPlace("host", desk.store, desk.arithmetic)
    monkeypatch.setattr(place, "compute", lambda *_: (_ for _ in ()).throw(OSError("gone")))
    main = desk.welcome(place)
    for call in range(1, 40):  # what fails has been answered, too
        main.send(desk.compute(call, 0, 0, 0, evict=False))
        assert main.failure("OSError", call_id=call)
    place.close()
