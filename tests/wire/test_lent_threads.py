"""Threads that wait and compute meanwhile: each job runs once, one at a time, in order, or goes back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from wire.lent_threads import LentThreads
from wire.serial import SerialThread

WAIT_S = 10.0


def refuse() -> None:
    raise AssertionError("the job was given back")


def test_no_thread_is_lent_no_job_is_taken() -> None:
    lent = LentThreads()
    assert not lent.offer(refuse, refuse)
    with lent.lend():
        assert lent.offer(lambda: None, lambda: None)
    assert not lent.offer(refuse, refuse)


def test_the_waiting_thread_runs_jobs_in_order() -> None:
    lent, done, ran = LentThreads(), threading.Event(), []

    def job(number: int) -> Callable[[], None]:
        def run() -> None:
            ran.append((number, threading.current_thread()))
            if number == 4:
                done.set()

        return run

    with lent.lend():
        for number in range(5):
            lent.offer(job(number), refuse)
        assert lent.run_until(done.is_set, WAIT_S)
    assert ran == [(number, threading.current_thread()) for number in range(5)]


def test_jobs_that_come_while_it_waits() -> None:
    lent, done = LentThreads(), threading.Event()

    def last() -> None:
        done.set()

    with lent.lend():
        other = threading.Thread(target=lambda: lent.offer(lambda: None, refuse) and lent.offer(last, refuse))
        other.start()
        assert lent.run_until(done.is_set, WAIT_S)
        other.join(WAIT_S)


def test_a_wait_ends_in_time_or_when_it_is_woken() -> None:
    lent, done = LentThreads(), threading.Event()
    with lent.lend():
        assert not lent.run_until(done.is_set, 0.01)
        threading.Timer(0.01, lambda: (done.set(), lent.wake())).start()
        assert lent.run_until(done.is_set, WAIT_S)


def test_jobs_that_were_not_run_go_back() -> None:
    lent, back = LentThreads(), []
    with lent.lend():
        with lent.lend():
            lent.offer(refuse, lambda: back.append(1))
        assert back == [], "one thread is lent still"
        lent.offer(refuse, lambda: back.append(2))
    assert back == [1, 2]


def test_a_job_that_goes_back_runs_on_its_own_thread() -> None:
    lent, ran = LentThreads(), threading.Event()
    serial = SerialThread("own", lambda error: None, lent)
    where: list[threading.Thread] = []

    def job(_: str) -> None:
        where.append(threading.current_thread())
        ran.set()

    with lent.lend():
        serial.lend(job, "lent")
    assert ran.wait(WAIT_S)
    ran.clear()
    serial.lend(job, "no thread is lent")
    assert ran.wait(WAIT_S)
    assert [thread.name for thread in where] == ["own", "own"]
    serial.close()


def test_a_job_that_is_not_due_any_more_does_not_go_back() -> None:
    lent, ran = LentThreads(), list[str]()
    thread = SerialThread("own", lambda error: None, lent)
    with lent.lend():
        thread.lend(ran.append, "done meanwhile", is_due=lambda: False)
        thread.lend(ran.append, "due", is_due=lambda: True)
    last = threading.Event()
    thread.submit(last.set)
    assert last.wait(WAIT_S)
    thread.close()
    assert ran == ["due"]


def test_a_job_that_raises_is_reported_and_ends_no_wait() -> None:
    lent, done, errors = LentThreads(), threading.Event(), []
    serial = SerialThread("own", errors.append, lent)

    def fails() -> None:
        raise RuntimeError("no such expert")

    with lent.lend():
        serial.lend(fails)
        serial.lend(done.set)
        assert lent.run_until(done.is_set, WAIT_S)
    assert [str(error) for error in errors] == ["no such expert"]
    serial.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=4))
def test_several_waiting_threads_run_each_job_once_and_one_at_a_time(each: list[list[int]]) -> None:
    """Each thread offers jobs, some of which offer others, and waits for its own last one."""
    lent, inside, ran = LentThreads(), threading.Lock(), []

    def offer(name: tuple[Any, ...], nested: int, last: threading.Event | None) -> None:
        def job() -> None:
            assert inside.acquire(blocking=False), "two jobs at once"
            ran.append(name)
            inside.release()
            for number in range(nested):
                offer((*name, number), 0, None)
            if last is not None:
                last.set()
                lent.wake()

        def take_back() -> None:
            job()

        assert lent.offer(job, take_back)

    def wait(thread: int) -> None:
        done = threading.Event()
        with lent.lend():
            for number, nested in enumerate(each[thread]):
                offer((thread, number), nested, None)
            offer((thread, "last"), 0, done)
            assert lent.run_until(done.is_set, WAIT_S)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(len(each))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    expected = [(thread, "last") for thread in range(len(each))]
    for thread, jobs in enumerate(each):
        for number, nested in enumerate(jobs):
            expected += [(thread, number), *((thread, number, inner) for inner in range(nested))]
    assert sorted(ran, key=str) == sorted(expected, key=str)
    for thread in range(len(each)):
        own = [name for name in ran if name[0] == thread and len(name) == 2]
        assert own == [*((thread, number) for number in range(len(each[thread]))), (thread, "last")]
