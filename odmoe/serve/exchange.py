"""One request's answers, from their threads to the client, to the log and to the metrics."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from odmoe.api.text_answer import Piece
from odmoe.serve.answers import AnswerEvent, OnPut
from odmoe.serve.api_error import ApiError, ClientGoneError, to_api_error

if TYPE_CHECKING:
    from main_node.report import Report
    from odmoe.serve.access_log import Record
    from odmoe.serve.openai.engine_request import EngineRequest
    from odmoe.serve.service import Service

REPORTS_S = 30.0
"""Longest wait for reports of answers that are whole: the main node itself waits a while for its last predictions."""


class Exchange:
    """Begins the answers. They are whole with their last tokens; their reports come later, and are waited for by
    `settle`, when the client has its response. An error of one of them ends all. Call `close` whatever happened."""

    def __init__(
        self,
        service: Service,
        record: Record,
        wanted: EngineRequest,
        on_put: OnPut = lambda item: None,
    ) -> None:
        """Raises QueueFullError."""
        self.service, self.record, self.wanted = service, record, wanted
        self._answers = service.answer_pool.start(wanted.answer_factories(service), on_put)
        self.tokens = 0
        """Of all its answers."""
        self.cached_tokens = 0
        """Of its prompts, those that the prefix cache had for the first answer to each."""
        self._last = dict.fromkeys(range(self._answers.count), record.began)
        """When each answer that is not whole gave its latest token."""
        self._begun: set[int] = set()
        self._owed: dict[int, str] = {}
        """Why each answer ended that is whole and has no report yet."""
        self._failure: Exception | None = None
        """What the next `take` raises; why not all answers are whole."""
        for _ in self._last:
            service.meter.on_begun()

    def stop(self, error: Exception) -> None:
        """`take` raises `error`, what is left is given up. Without effect on answers that are whole."""
        if self._last:
            self._answers.events.fail(error)
            self._answers.cancel()

    @property
    def whole(self) -> bool:
        """Whether all that is meant for the client has come."""
        return not self._last

    async def take(self) -> list[AnswerEvent]:
        """Pieces that have come since the last call, at least one, unless it is `whole`. Raises what ends it."""
        found: list[AnswerEvent] = []
        while self._last and not found:
            if self._failure is None:
                try:
                    found = self._count_events(await self._answers.events.take())
                except Exception as error:
                    self._failure = error
                    raise
            if self._failure is not None and not found:
                raise self._failure
        return found

    async def settle(self) -> None:
        """Wait for the reports of whole answers, for the log and the metrics. There may be none: of answers that were
        given up when their last tokens were on their way."""
        with contextlib.suppress(TimeoutError, ApiError, ClientGoneError):
            async with asyncio.timeout(REPORTS_S):
                while self._owed:
                    self._count_events(await self._answers.events.take())

    def _count_events(self, got: list[AnswerEvent]) -> list[AnswerEvent]:
        """Those of them that are for the client, up to the first error."""
        found = []
        for one in got:
            if isinstance(one.what, Piece):
                self._count_piece(one, one.what)
                found.append(one)
            elif not isinstance(one.what, Exception):
                self.service.failed.clear()
                self._last.pop(one.choice, None)
                self._owed.pop(one.choice, None)
                self._end(one.what.finish, one.what)
            elif one.choice in self._owed:
                self._end(self._owed.pop(one.choice), None)
            else:
                self._failure = one.what
                break
        return found

    def _count_piece(self, got: AnswerEvent, piece: Piece) -> None:
        meter, record = self.service.meter, self.record
        self.tokens += 1
        before, self._last[got.choice] = self._last[got.choice], got.at
        if got.choice in self._begun:
            meter.on_next_token(got.at - before)
        else:
            self._begun.add(got.choice)
            if got.choice % self.wanted.n == 0:
                self.cached_tokens += piece.step.cached_tokens
            meter.on_first_token(got.at - record.began)
            record.ttft_s = record.ttft_s or got.at - record.began
        if piece.step.finish is not None:
            del self._last[got.choice]
            self._begun.discard(got.choice)
            self._owed[got.choice] = piece.step.finish

    def _end(self, finish: str, report: Report | None) -> None:
        self.record.on_answered(finish, report)
        self.service.meter.on_ended(finish, report)

    @property
    def answering_count(self) -> int:
        """How many of its answers have a token, and not their last."""
        return len(self._begun)

    @property
    def waiting(self) -> int:
        """How many of its answers have no token yet."""
        return len(self._last) - len(self._begun)

    def close(self) -> None:
        """Give up what has not ended."""
        if self._last or self._owed:
            self._answers.cancel()
        for finish in self._owed.values():
            self._end(finish, None)
        if self._last:
            self.record.finish = _why(self._failure)
            for _ in self._last:
                self.service.meter.on_ended(self.record.finish, None)
        self.record.tokens = self.tokens
        self._owed.clear()
        self._last.clear()
        self._begun.clear()


def _why(error: Exception | None) -> str:
    """Why answers ended that are not whole, for log and metrics."""
    if error is None or isinstance(error, ClientGoneError):
        return "cancelled"
    return to_api_error(error).code or "error"
