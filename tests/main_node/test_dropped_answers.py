"""Answers that their clients drop without closing them. Nothing is left of them, though Python's cyclic collection is
off."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from main_node.answer import Answer, Step, TokenLoops, collect
from support.nodes.tapped_cluster import TappedCluster

pytestmark = pytest.mark.timeout(90)
WAIT_S = 20.0
DROPPED = 10
PROMPT = [5, 6, 7]


@contextmanager
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Failed(Exception):
    """Of a client."""


def never(answer: Answer) -> None:
    """Not even its first token is taken."""


def half(answer: Answer) -> None:
    next(answer)
    next(answer)


def to_the_last_token(answer: Answer) -> None:
    for _ in range(4):
        next(answer)


def failing(answer: Answer) -> None:
    try:
        for step in answer:
            raise Failed(step)
    except Failed:
        pass


def leaving_a_loop(answer: Answer) -> None:
    for _ in answer:
        break


CLIENTS: tuple[Callable[[Answer], None], ...] = (never, half, to_the_last_token, failing, leaving_a_loop)


def wait_until(done: Callable[[], bool]) -> bool:
    end = time.monotonic() + WAIT_S
    while not done() and time.monotonic() < end:
        time.sleep(0.002)
    return done()


def nothing_open(cluster: TappedCluster) -> bool:
    main = cluster.main
    left = (main.admission.counts(), main.engine.core.stats)
    return cluster.engine.idle() and main.steps.idle() and left == ((0, 0), {})


@pytest.mark.slow
def test_of_twenty_dropped_answers_none_stays_open(cluster: TappedCluster, nf4: Any) -> None:
    """The last half of them with a shadow."""
    caches: list[Any] = []
    with no_collection():
        for number in range(2 * DROPPED):
            if number == DROPPED:
                cluster.join_shadow(nf4)
            answer = cluster.main.generate(PROMPT, 4, ignore_eos=True)
            caches.append(weakref.ref(answer.request.sequence.cache))
            CLIENTS[number % len(CLIENTS)](answer)
            del answer
        assert wait_until(lambda: nothing_open(cluster))
        assert wait_until(lambda: [cache() for cache in caches] == [None] * 2 * DROPPED)
    cluster.nothing_left()
    assert len(collect(cluster.main.generate(PROMPT, 4, ignore_eos=True))[0]) == 4


@pytest.mark.slow
def test_dropping_an_answer_takes_no_lock(cluster: TappedCluster) -> None:
    """A finalizer runs in any thread, with any lock held: it must neither wait for a lock nor enter the scheduler."""
    held, release, closed = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        with cluster.engine._lock, cluster.main.admission._changed, cluster.main.steps._changed:
            held.set()
            release.wait(WAIT_S)

    with no_collection():
        answer = cluster.main.generate(PROMPT, 4, ignore_eos=True)
        next(answer)
        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(WAIT_S)

        def drop() -> None:
            nonlocal answer
            del answer
            closed.set()

        dropper = threading.Thread(target=drop)
        dropper.start()
        assert closed.wait(2.0)
        release.set()
        holder.join(WAIT_S)
        dropper.join(WAIT_S)
        assert wait_until(lambda: nothing_open(cluster))


@pytest.mark.parametrize("taken", [0, 1, 4, 5])
def test_the_end_of_a_with_block_closes_the_answer(taken: int, cluster: TappedCluster) -> None:
    with cluster.main.generate(PROMPT, 4, ignore_eos=True) as answer:
        for _ in range(taken):
            next(answer)
    cluster.nothing_left()
    assert cluster.main.admission.counts() == (0, 0)
    assert list(answer) == []


def test_an_error_in_a_with_block_closes_the_answer(cluster: TappedCluster) -> None:
    def client() -> None:
        with cluster.main.generate(PROMPT, 4, ignore_eos=True) as answer:
            raise Failed(next(answer))

    with pytest.raises(Failed):
        client()
    cluster.nothing_left()


def test_the_end_waits_for_loops_that_are_being_closed() -> None:
    """So that no thread of a cluster is left when its end has returned."""
    closed = threading.Event()

    def steps() -> Iterator[Any]:
        try:
            yield Step(1)
        finally:
            time.sleep(0.2)
            closed.set()

    class Dropped:
        number = 7

    before = set(threading.enumerate())
    loops, answer, loop = TokenLoops(), Dropped(), steps()
    next(loop)
    loops.add(answer, loop)  # type: ignore[arg-type]
    del answer
    loops.close()
    assert closed.is_set()
    assert set(threading.enumerate()) <= before
