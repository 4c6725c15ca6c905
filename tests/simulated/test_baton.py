"""Threads and time of a simulated world behave as the standard library's."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from support.simulated.baton import Baton, Killed, Process, Violation
from support.simulated.threads import Event, SimulatedRuntime

REAL = SimpleNamespace(
    Condition=threading.Condition,
    Event=threading.Event,
    Lock=threading.Lock,
    RLock=threading.RLock,
    SimpleQueue=queue.SimpleQueue,
    Thread=threading.Thread,
    Timer=threading.Timer,
    sleep=time.sleep,
    monotonic=time.monotonic,
)


def on_both(program: Callable[[Any, Callable[[str], None]], None]) -> None:
    """A program whose order the standard library fixes prints the same in both, whatever the seed."""
    said: list[str] = []
    program(REAL, said.append)
    for seed in range(20):
        simulated: list[str] = []
        baton = Baton(seed, preempt=0.3)
        names: Any = SimulatedRuntime(baton)
        baton.run(partial(program, names, simulated.append))
        assert simulated == said


def test_a_condition_is_waited_for_until_it_is_told_or_time_is_over() -> None:
    def program(names: Any, say: Callable[[str], None]) -> None:
        changed, found = names.Condition(), []

        def tell() -> None:
            names.sleep(0.02)
            with changed:
                found.append(1)
                changed.notify_all()

        thread = names.Thread(target=tell, name="teller", daemon=True)
        thread.start()
        with changed:
            say(str(changed.wait_for(lambda: found, 5.0)))
            say(str(changed.wait(0.01)))
        thread.join()
        say(str(thread.is_alive()))

    on_both(program)


def test_queues_locks_events_and_timers() -> None:
    def program(names: Any, say: Callable[[str], None]) -> None:
        jobs, done, lock = names.SimpleQueue(), names.Event(), names.Lock()

        def work() -> None:
            while (job := jobs.get()) is not None:
                say(job)
            done.set()

        names.Thread(target=work, daemon=True).start()
        for job in ("a", "b", None):
            jobs.put(job)
        say(str(done.wait(5.0)))
        with lock:
            say(str(lock.acquire(blocking=False)))
            say(str(lock.acquire(timeout=0.01)))
        again = names.RLock()
        with again, again:
            say("held twice")
        try:
            jobs.get_nowait()
        except queue.Empty:
            say("empty")
        late, never = names.Event(), names.Event()
        names.Timer(0.01, late.set).start()
        other = names.Timer(0.01, never.set)
        other.start()
        other.cancel()
        say(f"{late.wait(5.0)} {never.wait(0.05)}")

    on_both(program)


def test_time_jumps_to_the_next_end_of_a_wait() -> None:
    baton = Baton(0)
    began = time.monotonic()
    baton.run(lambda: baton.sleep(1e6))
    assert baton.now == pytest.approx(1e6 + 1000)
    assert time.monotonic() - began < 5


def test_a_deadlock_is_a_violation_that_names_the_threads() -> None:
    baton = Baton(0)
    names: Any = SimulatedRuntime(baton)
    one, other = names.Lock(), names.Lock()

    def take(first: Any, second: Any) -> None:
        with first:
            names.sleep(0.1)
            with second:
                pass

    def beat() -> None:
        while True:
            names.sleep(0.01)

    def program() -> None:
        names.Thread(target=beat, name="beats").start()
        threads = [names.Thread(target=take, args=pair, name="crossing") for pair in ((one, other), (other, one))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with pytest.raises(Violation, match=r"each other's locks: world: crossing -> world: crossing -> world: crossing"):
        baton.run(program)
    assert not baton.tasks, "all threads are ended all the same"


def test_a_thread_that_does_not_end_with_its_world_is_a_violation_that_names_it() -> None:
    baton = Baton(0)

    def stay() -> None:
        try:
            baton.sleep(1e9)
        except Killed:
            baton._outside.switch()

    def program() -> None:
        baton.spawn("stays", Process("node"), stay)
        baton.sleep(1.0)

    with pytest.raises(Violation, match=r"these threads have not(.|\n)*node: stays"):
        baton.run(program)


def test_a_thread_that_has_not_begun_when_its_world_ends_never_begins() -> None:
    baton, said = Baton(0), []
    baton.run(lambda: baton.spawn("late", Process("node"), lambda: said.append("begun")))
    assert said == []
    assert not baton.tasks


def test_no_deadline_at_all_is_a_violation_that_names_the_threads() -> None:
    baton = Baton(0)
    never = Event(baton)
    with pytest.raises(Violation, match=r"every thread waits for another(.|\n)*first"):
        baton.run(never.wait)


def test_an_update_that_is_lost_between_two_threads_is_found_by_some_seed() -> None:
    def total(seed: int) -> int:
        baton, count = Baton(seed, preempt=0.2), [0]
        names: Any = SimulatedRuntime(baton)
        unrelated = names.Lock()

        def add() -> None:
            before = count[0]
            with unrelated:
                pass
            count[0] = before + 1

        def program() -> None:
            threads = [names.Thread(target=add) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        baton.run(program)
        return count[0]

    found = [total(seed) for seed in range(40)]
    assert 3 in found
    assert min(found) < 3
    assert found == [total(seed) for seed in range(40)]


def test_a_process_is_frozen_and_killed() -> None:
    baton, said = Baton(0), []
    process = Process("node")

    def count() -> None:
        while True:
            baton.sleep(1.0)
            said.append(int(baton.now - 1000))

    def program() -> None:
        baton.spawn("counter", process, count)
        baton.sleep(2.5)
        baton.freeze(process)
        baton.sleep(3.0)
        baton.thaw(process)
        baton.sleep(1.1)
        baton.kill(process)
        baton.sleep(10.0)

    baton.run(program)
    assert said == [1, 2, 5, 6]
