"""Who gets the threads of answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from odmoe.serve.answers import Desk, Make, RequestAnswers
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


def of(answers: list[Held]) -> list[Make]:
    return [lambda one=one: one for one in answers]  # type: ignore[misc]


def begun(answers: list[Held]) -> int:
    return sum(one.begun.is_set() for one in answers)


def run(test: Callable[[Desk], Coroutine[Any, Any, None]], parallel: int, queue: int) -> None:
    desk = Desk(parallel, queue)
    asyncio.run(test(desk))
    assert desk.close(WAIT_S)


def test_further_answers_of_a_request_begin_when_others_end() -> None:
    """How many threads were free when it came does not matter later."""

    async def test(desk: Desk) -> None:
        alone, several = [Held() for _ in range(3)], [Held() for _ in range(4)]
        for one in alone:
            desk.start(of([one]))
        desk.start(of(several))
        until(lambda: begun(several) == 1)
        assert desk.taken == 4
        with pytest.raises(QueueFullError, match="4 answers are under way or wait"):
            desk.start(of([Held()]))
        for one in alone:
            one.go.set()
        until(lambda: begun(several) == 2)
        assert desk.taken == 2, "as many as are answered at once"
        several[0].go.set()
        until(lambda: begun(several) == 3)
        for one in several:
            one.go.set()
        until(lambda: desk.taken == 0)

    run(test, parallel=2, queue=2)


def test_nobody_is_refused_for_the_further_answers_of_another() -> None:
    async def test(desk: Desk) -> None:
        alone, several = Held(), [Held() for _ in range(8)]
        started: list[RequestAnswers] = [desk.start(of([alone])), desk.start(of(several))]
        assert desk.taken == 2
        started += [desk.start(of([Held()])) for _ in range(2)]
        for one in started:
            one.cancel()
        until(lambda: desk.taken == 0)
        assert begun(several) <= 1

    run(test, parallel=2, queue=2)
