"""A stream that breaks while the worker is at work, before the worker has heard that it is over."""

from __future__ import annotations

import threading

import pytest

from scheduler.errors import LinkError
from support.nodes.held import HeldLoader
from support.nodes.worker_desk import WAIT_S, Expected, WorkerDesk
from wire.messages import Load, Loaded, Message

pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable")


class Broken:
    """Takes everything but the word of a load."""

    def __init__(self) -> None:
        self.refused = threading.Event()

    def send(self, *messages: Message) -> None:
        if any(isinstance(message, Loaded) for message in messages):
            self.refused.set()
            raise LinkError("the stream is closed")

    def close(self) -> None:
        pass


@pytest.mark.parametrize("slots", [1, 2])
def test_a_load_whose_word_cannot_be_sent_leaves_its_slot(desk: WorkerDesk, expected: Expected, slots: int) -> None:
    """Whoever connects next finds every slot free."""
    worker, reply = desk.worker(slots), Broken()
    session = worker.accept(reply)
    session.on_message(desk.hello())
    session.on_message(Load(1, 0, 0, 1))
    assert reply.refused.wait(WAIT_S)
    session.on_close(LinkError("the stream is closed"))
    desk.welcome(worker).loads_and_computes(2, desk.compute(3, 0, 1, 2), expected)


def test_a_load_that_comes_behind_the_end_is_not_begun(
    desk: WorkerDesk, held_loader: HeldLoader, expected: Expected
) -> None:
    """Another main node was served meanwhile; what its predecessor still says takes no slot."""
    worker = desk.worker(1, loader=held_loader)
    session = worker.accept(Broken())
    session.on_message(desk.hello())
    main = desk.welcome(worker)
    assert session.over
    session.on_message(Load(1, 0, 0, 1))
    main.loads_and_computes(2, desk.compute(3, 0, 1, 2), expected)
    assert held_loader.begun == [(1, 2)]
