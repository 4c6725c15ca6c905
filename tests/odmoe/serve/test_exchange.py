"""The answers of one request, and what is counted of them, where they are stopped at a bad moment."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from main_node.answer import Step
from odmoe.api.text_answer import Piece
from odmoe.serve.access_log import Record
from odmoe.serve.answers import AnswerPool
from odmoe.serve.api_error import ApiError
from odmoe.serve.exchange import Exchange
from scheduler.errors import MainNodeLostError
from support.machines.http_service import WAIT_S, until

STOPPED = ApiError(503, "stopped", code="stopped")


class Answer:
    """Two tokens; then no report before it is given up, or `error`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.report, self._error, self._given_up = None, error, threading.Event()
        self.given = threading.Event()

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *why: object) -> None:
        pass

    def __iter__(self) -> Iterator[Piece]:
        yield Piece("a", Step(1))
        yield Piece("b", Step(2, finish="length"))
        self.given.set()
        if self._error is not None:
            raise self._error
        assert self._given_up.wait(WAIT_S)

    def cancel(self) -> None:
        self._given_up.set()


class World:
    """An exchange of such answers."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = answers
        self.ended: list[str] = []
        meter = SimpleNamespace(
            on_begun=lambda: None,
            on_first_token=lambda s: None,
            on_next_token=lambda s: None,
            on_ended=lambda finish, report: self.ended.append(finish),
        )
        self.answer_pool = AnswerPool(len(answers), 0)
        service: Any = SimpleNamespace(answer_pool=self.answer_pool, meter=meter, count=lambda: None)
        asked: Any = SimpleNamespace(n=1, answer_factories=lambda service: [lambda one=one: one for one in answers])
        self.record = Record("id", "POST", "/v1/completions")
        self.exchange = Exchange(service, self.record, asked)
        for one in answers:
            assert one.given.wait(WAIT_S)

    async def text(self) -> str:
        found = []
        while not self.exchange.whole:
            found += await self.exchange.take()
        return "".join(one.what.text for one in found if isinstance(one.what, Piece))

    def close(self) -> None:
        self.exchange.close()
        until(lambda: self.answer_pool.busy_threads == 0)


def test_an_answer_whose_last_tokens_have_come_is_whole_though_it_is_stopped() -> None:
    async def test() -> None:
        world = World(Answer())
        world.exchange.stop(STOPPED)
        assert await world.text() == "ab"
        await asyncio.wait_for(world.exchange.settle(), WAIT_S)
        world.close()
        assert (world.ended, world.record.finish, world.record.tokens) == (["length"], "length", 2)

    asyncio.run(test())


def test_a_main_node_that_is_lost_after_the_last_token_costs_the_report_alone() -> None:
    async def test() -> None:
        world = World(Answer(MainNodeLostError("gone")), Answer(MainNodeLostError("gone")))
        assert sorted(await world.text()) == ["a", "a", "b", "b"]
        await asyncio.wait_for(world.exchange.settle(), WAIT_S)
        world.close()
        assert (world.ended, world.record.finish) == (["length"] * 2, "length")

    asyncio.run(test())


def test_a_wait_for_reports_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odmoe.serve.exchange.REPORTS_S", 0.01)

    async def test() -> None:
        world = World(Answer())
        assert await world.text() == "ab"
        await asyncio.wait_for(world.exchange.settle(), WAIT_S)
        assert not world.ended
        world.close()
        assert world.ended == ["length"]

    asyncio.run(test())
