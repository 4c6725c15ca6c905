"""One HTTP request's answers, from their threads to the client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from starlette.types import Receive

from odmoe.api.text_answer import Piece
from odmoe.serve.answers import Got
from odmoe.serve.errors import ApiError, ClientGoneError, told

if TYPE_CHECKING:
    from odmoe.serve.access_log import Record
    from odmoe.serve.openai.engine_request import EngineRequest
    from odmoe.serve.service import Service


class Exchange:
    """Begins the answers. They end when they are whole, or with the first of these: an error of one of them, the
    request's deadline, the client's leaving, `stop`. Call `close` whatever happened."""

    def __init__(self, service: Service, record: Record, wanted: EngineRequest, receive: Receive) -> None:
        """Raises QueueFullError."""
        self.service, self.record, self.wanted = service, record, wanted
        self.answers = service.desk.start(wanted.makes(service))
        self.tokens = 0
        """Of all its answers."""
        self._last = dict.fromkeys(range(self.answers.count), record.began)
        """When each answer that has not ended gave its last token."""
        self._begun: set[int] = set()
        self._closed = False
        self._failure: Exception | None = None
        """What the next `take` raises."""
        for _ in self._last:
            service.meter.began()
        service.under_way.add(self)
        service.count()
        self._watch = asyncio.create_task(self._watch_client(receive))
        self._timer = self._deadline()

    def _deadline(self) -> asyncio.TimerHandle | None:
        limit = self.service.limits.request_timeout_s
        if limit is None:
            return None
        error = ApiError(
            504,
            f"the answer was not complete within {limit:g} s (--request-timeout); ask for fewer tokens, or try again "
            "when fewer requests are under way",
            "server_error",
            code="deadline",
        )
        left = self.record.began + limit - time.perf_counter()
        return asyncio.get_running_loop().call_later(max(0.0, left), self.stop, error)

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.stop(ClientGoneError("the client has gone"))

    def stop(self, error: Exception) -> None:
        """The client gets `error` in place of what is left, which is given up, also where it does not read."""
        self.answers.feed.fail(error)
        self.answers.cancel()

    async def take(self) -> list[Got]:
        """What has come of the answers since the last call, at least one. Raises what ends the request."""
        if self._failure is not None:
            raise self._failure
        got = await self.answers.feed.take()
        for place, one in enumerate(got):
            if isinstance(one.what, Exception):
                if not place:
                    raise one.what
                self._failure = one.what  # after what came before it
                return got[:place]
            self._note(one)
        return got

    async def all(self, first: list[Got]) -> AsyncIterator[list[Got]]:
        """`first`, and everything after it."""
        yield first
        while self._last:
            yield await self.take()

    def _note(self, got: Got) -> None:
        meter, record = self.service.meter, self.record
        if isinstance(got.what, Piece):
            self.tokens += 1
            before, self._last[got.choice] = self._last[got.choice], got.at
            if got.choice in self._begun:
                meter.next_token(got.at - before)
                return
            self._begun.add(got.choice)
            meter.first_token(got.at - record.began)
            record.ttft_s = record.ttft_s or got.at - record.began
        elif not isinstance(got.what, Exception):
            del self._last[got.choice]
            self._begun.discard(got.choice)
            record.answered(got.what)
            meter.ended(got.what.finish, got.what)
        self.service.count()

    @property
    def answered(self) -> int:
        """How many of its answers have a token and have not ended."""
        return len(self._begun)

    @property
    def waiting(self) -> int:
        """How many of its answers have no token yet."""
        return len(self._last) - len(self._begun)

    def close(self, error: BaseException | None = None) -> None:
        """Give up what has not ended. `error`: why."""
        if self._closed:
            return
        self._closed = True
        self._watch.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._last:
            self.answers.cancel()
            self.record.finish = _why(error)
            for _ in self._last:
                self.service.meter.ended(self.record.finish, None)
        self.record.tokens = self.tokens
        self._last.clear()
        self._begun.clear()
        self.service.under_way.discard(self)
        self.service.count()


def _why(error: BaseException | None) -> str:
    """Why answers ended that are not whole, for log and metrics."""
    if error is None or isinstance(error, (ClientGoneError, asyncio.CancelledError, GeneratorExit)):
        return "cancelled"
    return told(error).code or "error" if isinstance(error, Exception) else "error"
