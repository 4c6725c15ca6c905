"""From the first request to the last: signals, and the drain."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn

from odmoe.serve.api_error import SERVER, ApiError
from odmoe.serve.bounds.listening import ListeningSocket, ignore_exhaustion, raise_file_limit
from odmoe.serve.bounds.places import SPARE, Places
from odmoe.serve.connection import ClientLimits, Connection
from odmoe.terminal import count_text

if TYPE_CHECKING:
    from fastapi import FastAPI

    from odmoe.serve.service import Service

CLOSE_S = 5
"""Longest wait for connections to close once no answer is under way."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Uvicorn(uvicorn.Server):
    """Leaves signals to `HttpServer`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def usual_client_limits(answers: int) -> ClientLimits:
    """With connections for so many answers beyond the usual ones."""
    usual = ClientLimits()
    return replace(
        usual,
        connections=usual.connections + answers,
        address_connections=usual.address_connections + answers,
    )


class HttpServer:
    """Serves an application until it is told to stop: then it takes no more requests, and ends when those under way
    have ended, or after `drain_s`."""

    def __init__(
        self,
        app: FastAPI,
        service: Service,
        listening: socket.socket,
        drain_s: float,
        notify: Callable[[str], None] = lambda text: None,
        client_limits: ClientLimits | None = None,
    ) -> None:
        """`listening`: bound, not listening yet; it is closed at the end. `notify`: gets a line about the drain, and
        about connections that are closed. `client_limits`: None: the usual ones, and a connection more for each answer
        that may wait."""
        self._service, self._listening = service, listening
        self._drain_s, self._notify = drain_s, notify
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: Exception | None = None
        """Why it cannot go on."""
        client_limits = client_limits or usual_client_limits(service.answer_pool.places)
        files = raise_file_limit()
        most = min(client_limits.connections, max(1, files - SPARE))
        if most < client_limits.connections:
            notify(
                f"at most {most} connections, not {client_limits.connections}: the limit of open files leaves no more"
            )
        self._places = Places(most, client_limits.address_connections, notify, service.meter.on_refused)
        connection: Any = partial(Connection, client_limits, self._places, service.meter.on_refused)
        config = uvicorn.Config(
            app,
            http=connection,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="error",  # a stranger causes warnings as often as he likes
            access_log=False,
            backlog=socket.SOMAXCONN,
            server_header=False,
            proxy_headers=False,  # `make_app` decides whose headers are believed
            timeout_graceful_shutdown=CLOSE_S,
        )
        self._uvicorn = _Uvicorn(config)
        self._asked = 0
        """How often it was told to stop."""

    def run(self) -> int:
        """Returns the exit code: 0, or 128 and a signal's number if a second one ended the drain. Raises what `fail`
        was given."""
        code = asyncio.run(self._run())
        if self._failure is not None:
            raise self._failure
        return code

    async def _run(self) -> int:
        loop = self._loop = asyncio.get_running_loop()
        self._stop, self._at_once = asyncio.Event(), asyncio.Event()
        self._code = 0
        loop.set_exception_handler(ignore_exhaustion)
        listening = ListeningSocket(self._listening, self._places.shed)
        serving = asyncio.create_task(self._uvicorn.serve([listening]))
        stopping = asyncio.create_task(self._stop.wait())
        with self._signals():
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if not serving.done():
                await self._drain()
                await serving
        for connection in list(self._uvicorn.server_state.connections):
            connection.transport.abort()
        serving.result()  # raises what has ended it
        return self._code

    def stop(self, number: int = 0) -> None:
        """From any thread. The second time: at once. `number`: of the signal that says so."""
        if self._loop is None:  # it has not begun
            return
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._on_stop, number)

    def fail(self, error: Exception) -> None:
        """From any thread: end at once, and have `run` raise `error`. Without effect before it runs."""
        if self._loop is None:
            return
        self._failure = error
        self.stop()
        self.stop()

    def _on_stop(self, number: int) -> None:
        if self._stop.is_set():
            self._code = 128 + number if number else 0
            self._at_once.set()
        self._stop.set()

    async def _drain(self) -> None:
        self._service.stopping = True
        under_way = self._service.under_way
        if under_way:
            self._notify(
                f"stopping: {count_text(len(under_way), 'request')} under way, for at most {self._drain_s:g} s; "
                "once more to stop at once"
            )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                await _either(self._empty(), self._at_once.wait())
        if under_way:
            self._notify(f"giving up {count_text(len(under_way), 'request')}")
        for request in list(under_way):
            text = "the server was stopped before the answer was complete"
            request.stop(ApiError(503, text, SERVER, code="stopped"))
        self._uvicorn.should_exit = True

    async def _empty(self) -> None:
        while self._service.under_way:
            await asyncio.sleep(0.02)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM stop the server, if it runs in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in SIGNALS}
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_stop, number)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)


async def _either(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of these has ended; cancel the others."""
    tasks = [asyncio.create_task(one) for one in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
