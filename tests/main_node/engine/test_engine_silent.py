"""The engine with workers that keep silent, by a clock that passes only while it waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler import types as t
from scheduler.errors import RequestFailedError
from support.nodes.engine_world import (
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
    silent,
)
from support.nodes.virtual_time import VirtualTime
from wire import messages as w

pytestmark = pytest.mark.timeout(60)

Virtual = Callable[[Desk], VirtualTime]


@pytest.mark.parametrize("kind", [w.Load | w.Compute, w.Compute])
def test_a_silent_worker_is_dropped(kind: Any, desk_of: Any, virtual_time: Virtual, caplog: Any) -> None:
    desk = desk_of(answer_s=0.3)
    virtual_time(desk)
    fakes = desk.workers(once(kind, silent, always=True), good, good)
    desk.open()
    for layer in LAYERS:
        desk.check(rows_of(layer, experts=(0, 1)), layer)
    assert sorted(desk.engine.peers.workers) == [1, 2]
    assert fakes[0].closed.wait(WAIT_S)
    assert "worker 0 has not answered for 0.3 s" in caplog.text


def test_the_last_worker_silent_fails_the_request(desk_of: Any, virtual_time: Virtual) -> None:
    desk = desk_of(answer_s=0.3)
    virtual_time(desk)
    desk.workers(once(w.Compute, silent), once(w.Compute, silent))
    desk.open()
    with pytest.raises(RequestFailedError, match=r"has not answered for 0\.3 s"):
        Later(lambda: desk.layer(rows_of(1))).result()


def test_an_evicted_load_is_not_owed(desk_of: Any, virtual_time: Virtual) -> None:
    """A load that was given up is never answered; its worker is well, and stays when another keeps silent."""
    desk = desk_of(answer_s=0.4)
    virtual_time(desk)
    # Layer 0 of position 5 is turn 15, so its group is workers 2 and 3; layer 1's is 0 and 1.
    fakes = desk.workers(once(w.Compute, silent), good, good, once(w.Load, silent))
    desk.shadow()
    desk.open()
    desk.engine.post(t.Predicted(1, 5, 0, (2, 3)))
    fakes[3].wait(w.Load)
    desk.check(rows_of(1, experts=(0, 1)), 0)
    assert fakes[3].of(w.Evict)
    desk.check(rows_of(2, experts=(0, 1)), 1)
    assert sorted(desk.engine.peers.workers) == [1, 2, 3]


def test_a_worker_asked_late_has_its_time(desk_of: Any, virtual_time: Virtual) -> None:
    """What it is given shortly before another one's deadline is due `answer_s` later, or after its last word."""
    desk = desk_of(answer_s=1.0)
    time = virtual_time(desk)

    def lost_late(fake: Fake, message: w.Message) -> Say:
        time.after(0.8, fake.reply.close)
        return None

    def slow(fake: Fake, message: w.Load | w.Compute) -> Say:
        if isinstance(message, w.Load):
            time.after(0.9, fake.say, w.Loaded(message.load_id, 100, 0.9))
        else:
            time.after(1.8, fake.say, computed(message))
        return None

    # Position 5, layer 0 is turn 15: of three workers the ring begins with worker 0.
    desk.workers(once(w.Compute, lost_late), *[once(w.Load | w.Compute, slow, always=True)] * 2)
    desk.open()
    began = time.now
    desk.check(rows_of(1, experts=(0,)))
    assert time.now - began == pytest.approx(0.8 + 1.8)
    assert sorted(desk.engine.peers.workers) == [1, 2]


def test_chatter_is_no_answer(desk_of: Any, virtual_time: Virtual) -> None:
    """A worker that talks of what nobody asked is as silent as one that says nothing."""
    desk = desk_of(answer_s=0.3)
    time = virtual_time(desk)
    said: list[float] = []

    def chatter(fake: Fake, message: w.Message) -> Say:
        if not fake.closed.is_set():
            said.append(time.now)
            fake.say(w.Loaded(9_999, 1, 0.0), computed(w.Compute(9_998, *message_of(message), False)))
            time.after(0.02, chatter, fake, message)
        return None

    desk.workers(once(w.Compute, chatter), good)
    desk.open()
    desk.check(rows_of(1, experts=(0, 1)))
    assert sorted(desk.engine.peers.workers) == [1]
    assert len(said) > 10


def message_of(message: Any) -> tuple[Any, ...]:
    return message.slot, message.layer, message.expert, message.hidden, message.weights
