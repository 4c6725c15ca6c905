"""Where a worker computes, and which of its outputs travel together."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

import pytest

from support.nodes.held import HeldArithmetic
from support.nodes.worker_desk import NO_THREAD_FAILS, WAIT_S, Expected, WorkerDesk
from wire.lent_threads import LentThreads
from wire.messages import Computed, Evict, Load, Loaded, Message, WorkerReady

pytestmark = NO_THREAD_FAILS


class Calls:
    """A channel that keeps the messages of each call of `send`."""

    def __init__(self) -> None:
        self.made: SimpleQueue[tuple[Message, ...]] = SimpleQueue()

    def send(self, *messages: Message) -> None:
        self.made.put(messages)

    def close(self) -> None: ...

    def next(self) -> tuple[Any, ...]:
        return self.made.get(timeout=WAIT_S)


ALONE = [[10], [11], [12]]


@pytest.mark.parametrize(
    ("small_bytes", "evict", "calls"),
    [(1 << 20, False, [[10, 11, 12]]), (0, False, ALONE), (1 << 20, True, ALONE)],
    ids=["small", "large", "of slots that come free"],
)
def test_small_outputs_that_are_ready_together_travel_together(
    desk: WorkerDesk,
    held_arithmetic: HeldArithmetic,
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
    small_bytes: int,
    evict: bool,
    calls: list[list[int]],
) -> None:
    monkeypatch.setattr("worker_node.session.SMALL_BYTES", small_bytes)
    gate, reply = held_arithmetic.hold(0), Calls()
    session = desk.worker(slots=3, arithmetic=held_arithmetic).accept(reply)
    session.on_message(desk.hello())
    assert isinstance(reply.next()[0], WorkerReady)
    for slot in range(3):
        session.on_message(Load(1 + slot, slot, 0, slot))
        assert isinstance(reply.next()[0], Loaded)
    asked = [desk.compute(10 + slot, slot, 0, slot, evict=evict) for slot in range(3)]
    session.on_message(asked[0])
    gate.wait_for_arrival()
    for one in asked[1:]:
        session.on_message(one)
    gate.open()
    answers = [reply.next() for _ in calls]
    assert [[answer.call_id for answer in together] for together in answers] == calls
    for one, answer in zip(asked, [answer for together in answers for answer in together], strict=True):
        assert expected.fits(answer, one)


def test_a_thread_that_waits_computes_what_is_in_a_slot(desk: WorkerDesk, expected: Expected) -> None:
    lent, where = LentThreads(), []
    worker = desk.worker(lent=lent)
    compute = worker.compute

    def watched(*args: Any) -> Any:
        where.append(threading.current_thread())
        return compute(*args)

    worker.compute = watched  # type: ignore[method-assign]
    main = desk.welcome(worker)
    main.send(Load(1, 0, 0, 0))
    assert isinstance(main.next(), Loaded)
    lent_to, alone = desk.compute(10, 0, 0, 0, evict=False), desk.compute(11, 0, 0, 0)
    with lent.lend():
        main.send(lent_to)
        assert not lent.run_until(lambda: False, 0.01)
    assert expected.fits(main.next(), lent_to)
    main.send(alone)
    answer = main.next()
    assert isinstance(answer, Computed)
    assert expected.fits(answer, alone)
    assert where[0] is threading.current_thread()
    assert where[1].name.startswith(worker.name), "no thread was lent: the worker's own computes"


def test_an_interrupted_computation_leaves_its_slot(desk: WorkerDesk, expected: Expected) -> None:
    """Ctrl-C on the lent thread: the computation has failed, and the slot serves the next one."""
    lent = LentThreads()
    worker = desk.worker(lent=lent, slots=1)
    compute = worker.compute

    def interrupted(*args: Any) -> Any:
        worker.compute = compute  # type: ignore[method-assign]
        raise KeyboardInterrupt

    worker.compute = interrupted  # type: ignore[method-assign]
    main = desk.welcome(worker)
    main.send(Load(1, 0, 0, 0))
    assert isinstance(main.next(), Loaded)
    with lent.lend():
        main.send(desk.compute(10, 0, 0, 0))
        with pytest.raises(KeyboardInterrupt):
            lent.run_until(lambda: False, WAIT_S)
    main.failure("KeyboardInterrupt", call_id=10)
    main.send(Evict(0))
    main.loads_and_computes(2, desk.compute(11, 0, 0, 1), expected)
