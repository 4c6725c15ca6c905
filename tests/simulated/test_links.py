"""The order of a node's messages is watched: one that overtakes another ends the world."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support.simulated.baton import Baton
from support.simulated.links import Order
from wire.messages import Beat


@pytest.mark.parametrize(
    ("received", "told"),
    [((1, 2, 3), ""), ((1, 3, 2), ""), ((2, 1), "overtaken"), ((3, 1), "overtaken"), ((1, 1), "once more")],
)
def test_a_message_comes_once_and_after_those_whose_sending_had_ended(received: tuple[int, ...], told: str) -> None:
    """The third is sent while the second's sending is under way: these two may come in either order."""
    baton = Baton(0)
    channel: Any = SimpleNamespace()
    order = Order(baton, channel)
    channel.send = lambda message: order.send(Beat(3)) if message == Beat(2) else None
    order.send(Beat(1))
    order.send(Beat(2))
    for number in received:
        order.received(Beat(number))
    assert told in str(baton.violation)
    assert bool(told) == (baton.violation is not None)
