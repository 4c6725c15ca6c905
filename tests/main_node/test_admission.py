"""Places among the requests that are answered at once, and the queue for them."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest

from main_node.admission import Admission, Sharing
from scheduler.errors import DeadlineError, QueueFullError, RequestCancelledError, RequestError
from support.nodes.engine_world import WAIT_S, Later, made_up


def waiting(admission: Admission, count: int) -> None:
    """Until so many wait."""
    reached = threading.Event()
    for _ in range(int(WAIT_S * 1000)):
        if admission.counts()[1] == count:
            return
        reached.wait(0.001)
    raise AssertionError(f"{admission.counts()} and not {count} wait")


def test_places_are_given_in_the_order_of_the_requests() -> None:
    admission, order = Admission(Sharing(parallel=2, queue=8, launch_s=WAIT_S)), []
    lock = threading.Lock()

    def take(number: int) -> None:
        with admission.place(made_up(number)), lock:
            order.append(number)
            assert admission.counts()[0] <= 2

    with ExitStack() as held:
        held.enter_context(admission.place(made_up(100)))
        held.enter_context(admission.place(made_up(101)))
        later = []
        for number in range(5):
            later.append(Later(lambda number=number: take(number)))
            waiting(admission, number + 1)
    for one in later:
        one.result()
    assert order == [0, 1, 2, 3, 4]
    assert admission.counts() == (0, 0)


def test_one_too_many_is_named() -> None:
    admission = Admission(Sharing(parallel=1, queue=1, launch_s=WAIT_S))
    with admission.place(made_up(1)):
        second = Later(lambda: admission.place(made_up(2)).__enter__())
        waiting(admission, 1)
        with pytest.raises(QueueFullError, match=r"1 answered at once and 1 waiting; .*--parallel or --queue"):
            admission.place(made_up(3)).__enter__()
    second.result()
    assert issubclass(QueueFullError, RequestError)


def test_no_queue() -> None:
    admission = Admission(Sharing(parallel=1, queue=0, launch_s=WAIT_S))
    with admission.place(made_up(1)), pytest.raises(QueueFullError):
        admission.place(made_up(2)).__enter__()
    with admission.place(made_up(2)):
        pass


def test_time_in_which_workers_were_missing_does_not_count() -> None:
    """Of three looks at the clock the first two find that requests waited for workers meanwhile."""
    paused = iter([10.0, 10.05, 10.06, 10.06])
    admission = Admission(Sharing(parallel=1, queue=2, launch_s=0.05), lambda: next(paused))
    with admission.place(made_up(1)), pytest.raises(DeadlineError):
        admission.place(made_up(2)).__enter__()
    assert list(paused) == []


def test_a_wait_has_an_end_and_leaves_no_place_behind() -> None:
    admission = Admission(Sharing(parallel=1, queue=2, launch_s=0.05))
    with (
        admission.place(made_up(1)),
        pytest.raises(DeadlineError, match=r"request 2 waited 0\.05 s for one of 1 places"),
    ):
        admission.place(made_up(2)).__enter__()
    assert admission.counts() == (0, 0)
    with admission.place(made_up(3)):
        pass


@pytest.mark.parametrize("before", [True, False])
def test_a_cancelled_request_waits_no_longer(before: bool) -> None:
    """Whether it is cancelled while it waits, or just before."""
    admission, request = Admission(Sharing(parallel=1, queue=2, launch_s=WAIT_S)), made_up(2)
    with admission.place(made_up(1)):
        if before:
            request.cancelled.set()
        second = Later(lambda: admission.place(request).__enter__())
        if not before:
            waiting(admission, 1)
            request.cancelled.set()
            admission.wake_waiting()
        with pytest.raises(RequestCancelledError, match="request 2"):
            second.result()
        assert admission.counts() == (1, 0)
    with admission.place(made_up(2)):
        pass


def test_an_error_gives_the_place_back() -> None:
    admission = Admission(Sharing(parallel=1, queue=0, launch_s=WAIT_S))
    with pytest.raises(KeyError), admission.place(made_up(1)):
        raise KeyError
    assert admission.counts() == (0, 0)
