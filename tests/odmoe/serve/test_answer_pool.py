"""Who gets the threads of answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from odmoe.serve.answers import AnswerFactory, AnswerPool, RequestAnswers
from scheduler.errors import QueueFullError
from support.machines.http_service import WAIT_S, until


class Held:
    """An answer that ends when it is let go, or given up."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.report = SimpleNamespace(finish="stop")

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *why: object) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        self.begun.set()
        assert self.go.wait(WAIT_S)
        return iter(())

    def cancel(self) -> None:
        self.go.set()


def of(answers: list[Held]) -> list[AnswerFactory]:
    return [lambda one=one: one for one in answers]  # type: ignore[misc]


def begun(answers: list[Held]) -> int:
    return sum(one.begun.is_set() for one in answers)


def run(test: Callable[[AnswerPool], Coroutine[Any, Any, None]], parallel: int, queue: int) -> None:
    pool = AnswerPool(parallel, queue)
    asyncio.run(test(pool))
    assert pool.close(WAIT_S)


def test_further_answers_of_a_request_begin_when_others_end() -> None:
    """How many threads were free when it came does not matter later."""

    async def test(pool: AnswerPool) -> None:
        alone, several = [Held() for _ in range(3)], [Held() for _ in range(4)]
        for one in alone:
            pool.start(of([one]))
        pool.start(of(several))
        until(lambda: begun(several) == 1)
        assert pool.busy_threads == 4
        with pytest.raises(QueueFullError, match="4 answers are under way or wait"):
            pool.start(of([Held()]))
        for one in alone:
            one.go.set()
        until(lambda: begun(several) == 2)
        assert pool.busy_threads == 2, "as many as are answered at once"
        several[0].go.set()
        until(lambda: begun(several) == 3)
        for one in several:
            one.go.set()
        until(lambda: pool.busy_threads == 0)

    run(test, parallel=2, queue=2)


def test_nobody_is_refused_for_the_further_answers_of_another() -> None:
    async def test(pool: AnswerPool) -> None:
        alone, several = Held(), [Held() for _ in range(8)]
        started: list[RequestAnswers] = [pool.start(of([alone])), pool.start(of(several))]
        assert pool.busy_threads == 2
        started += [pool.start(of([Held()])) for _ in range(2)]
        for one in started:
            one.cancel()
        until(lambda: pool.busy_threads == 0)
        assert begun(several) <= 1

    run(test, parallel=2, queue=2)
