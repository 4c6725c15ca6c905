"""A request for answers, from its headers to the end of its response, and what may end it before."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from starlette.requests import ClientDisconnect, Request

from odmoe.serve.api_error import SERVER, ApiError, ClientGoneError, stopping
from odmoe.serve.exchange import Exchange

if TYPE_CHECKING:
    from odmoe.serve.access_log import Record
    from odmoe.serve.connection import Connection
    from odmoe.serve.openai.engine_request import EngineRequest
    from odmoe.serve.service import Service

Found = TypeVar("Found")
GIVEN_UP_S = 5.0
"""What a client has to read the rest of an answer that was given up."""


class RequestUnderWay:
    """What waits for it to end (a drain) finds it in `service.under_way`. It ends early with the first of these: its
    deadline, its client's leaving, `stop`."""

    def __init__(self, service: Service, request: Request) -> None:
        self._service, self._request = service, request
        self.record: Record = request.state.record
        self._connection: Connection | None = getattr(request.state, "connection", None)
        self._loop = asyncio.get_running_loop()
        self._stopped: asyncio.Future[Any] = self._loop.create_future()
        """Has the error that ended it early."""
        self._responded = False
        self._timers: list[asyncio.TimerHandle] = []
        self._watch: asyncio.Task[None] | None = None
        self._exchange: Exchange | None = None
        self.held = service.memory.open(self._give_way)

    def __enter__(self) -> Self:
        """Raises ApiError if the service takes no more requests."""
        if self._service.stopping:
            self.held.close()
            raise stopping()
        self._service.under_way.add(self)
        limit = self._service.limits.request_timeout_s
        if limit is not None:
            left = self.record.began + limit - time.perf_counter()
            self._timers.append(self._loop.call_later(max(0.0, left), self.stop, _late(limit)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_watches()
        if self._stopped.done():
            self._stopped.exception()  # nobody need have waited for it
        if self._exchange is not None:
            self._exchange.close()
        self.held.close()
        self._service.under_way.discard(self)

    def _give_way(self, error: ApiError) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.stop, error)

    def stop(self, error: Exception) -> None:
        """The client gets `error` in place of what is left. Without effect once it has the response."""
        if self._stopped.done() or self._responded:
            return
        self._stopped.set_exception(error)
        if self._exchange is not None:
            self._exchange.stop(error)
        if self._connection is not None:
            self._timers.append(self._loop.call_later(GIVEN_UP_S, self._connection.abort))

    async def unless_stopped(self, coming: Awaitable[Found]) -> Found:
        """What comes. Raises what the request was stopped with."""
        task = asyncio.ensure_future(coming)
        try:
            await asyncio.wait((task, self._stopped), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else self._stopped.result()
        finally:
            task.cancel()

    async def read_body(self) -> bytearray:
        """Raises ApiError for one that is too large, without reading all of it, or does not come in time;
        ClientGoneError."""
        limits = self._service.limits
        if _body_length(self._request) > limits.body_bytes:
            raise _too_large(limits.body_bytes)
        try:
            async with asyncio.timeout(limits.body_s):
                return await self.unless_stopped(self._body(limits.body_bytes))
        except TimeoutError as error:
            text = f"the request's body was not complete within {limits.body_s:g} s"
            raise ApiError(408, text, code="slow_request") from error

    async def _body(self, most: int) -> bytearray:
        body = bytearray()
        try:
            async for part in self._request.stream():
                self.held.add(len(part))
                body += part
                if len(body) > most:
                    raise _too_large(most)
        except ClientDisconnect as error:
            raise ClientGoneError("the client has gone") from error
        return body

    def begin(self, wanted: EngineRequest) -> Exchange:
        """The answers begin. Raises QueueFullError, or what the request was stopped with."""
        if self._stopped.done():
            self._stopped.result()
        self._exchange = Exchange(self._service, self.record, wanted, lambda got: self.held.add_results((got,)))
        self._watch = asyncio.create_task(self._watch_client())
        return self._exchange

    async def settle(self) -> None:
        """The client has the response: wait for what log and metrics need."""
        self._responded = True
        self._end_watches()
        if self._exchange is not None:
            await self._exchange.settle()

    def _end_watches(self) -> None:
        """Nothing ends it early any more."""
        for timer in self._timers:
            timer.cancel()
        if self._watch is not None:
            self._watch.cancel()

    async def _watch_client(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self.stop(ClientGoneError("the client has gone"))

    @property
    def waiting(self) -> int:
        """How many of its answers have no token yet."""
        return self._exchange.waiting if self._exchange is not None else 0

    @property
    def answering_count(self) -> int:
        """How many of its answers have a token, and not their last."""
        return self._exchange.answering_count if self._exchange is not None else 0


def _late(limit: float) -> ApiError:
    return ApiError(
        504,
        f"the answer was not complete within {limit:g} s (--request-timeout); ask for fewer tokens, or try again "
        "when fewer requests are under way",
        SERVER,
        code="deadline",
    )


def _body_length(request: Request) -> int:
    """The length of its body, as its headers have it. 0: they do not say."""
    length = request.headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() else 0


def _too_large(most: int) -> ApiError:
    text = f"the body has more than {most} bytes (--body-size); send shorter prompts, or fewer at once"
    return ApiError(413, text, code="too_large")
