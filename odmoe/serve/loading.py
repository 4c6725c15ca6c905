"""What listens while the model loads: it says that the process lives, that it is not ready, and how far it is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Self

import uvicorn
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from odmoe.serve.access_log import AccessLog
from odmoe.serve.api_error import SERVER, ApiError
from odmoe.serve.bounds.listening import ListeningSocket, ignore_exhaustion
from odmoe.serve.bounds.places import Places
from odmoe.serve.connection import ClientLimits, Connection
from odmoe.serve.error_forms import error_object
from odmoe.serve.sse import encode
from odmoe.terminal import Output, Terminal, task_name

AGAIN_S = 5
"""What `Retry-After` says: a model takes longer to load than a queue to have a place."""
BEGIN_S = 10.0
END_S = 10.0
"""Longest waits for the thread to listen, and to end."""
CLOSE_S = 1
"""Longest wait for a connection whose request has not arrived, and for a response that a client does not read."""


class LoadProgress:
    """How far a start is, for any thread. It names no files and no hosts: strangers ask too."""

    def __init__(self, phase: str = "starting") -> None:
        self._began = time.monotonic()
        self._state: tuple[str, int, int] = (phase, 0, 0)

    def set(self, phase: str, done: int = 0, total: int = 0) -> None:
        """`done` of `total`, in any unit; a `total` of 0: it is not known."""
        self._state = (phase, done, total)

    def facts(self) -> dict[str, Any]:
        """`{"phase": "writing experts", "share": 0.45, "elapsed_s": 12.3}`; `share` is null if it is not known."""
        phase, done, total = self._state
        share = round(min(1.0, done / total), 3) if total > 0 else None
        return {"phase": phase, "share": share, "elapsed_s": round(time.monotonic() - self._began, 1)}

    def text(self) -> str:
        """`the model is loading: writing experts, 45 %, 12 s so far`."""
        facts = self.facts()
        share = "" if facts["share"] is None else f", {facts['share']:.0%}"
        return f"the model is loading: {facts['phase']}{share}, {facts['elapsed_s']:.0f} s so far"


class StartTerminal(Terminal):
    """Also tells `LoadProgress` what it shows."""

    def __init__(self, output: Output, progress: LoadProgress) -> None:
        super().__init__(output.quiet, output.debug)
        self._load_progress = progress

    @contextlib.contextmanager
    def progress(self, text: str = "", lines: bool = True) -> Iterator[Callable[[str, int, int], None]]:
        self._load_progress.set(text or "opening the model")
        with super().progress(text, lines) as move:

            def move_both(task: str, done: int, total: int) -> None:
                self._load_progress.set(task_name(task), done, total)
                move(task, done, total)

            yield move_both

    @contextlib.contextmanager
    def status(self, text: str = "starting") -> Iterator[Callable[[str], None]]:
        self._load_progress.set("starting the nodes")  # the texts that follow may name hosts
        with super().status(text) as say:
            yield say


class _LoadingConnection(Connection):
    """An accepted connection has its request answered even if the server ends first: the client sends it to nobody
    else."""

    def shutdown(self) -> None:
        if self.cycle is not None:  # its response closes it
            super().shutdown()


class LoadingServer:
    """Answers on a bound socket within the block, in a thread of its own. What comes between this server and the next
    one on the same socket waits in the kernel's queue."""

    def __init__(
        self,
        listening: socket.socket,
        progress: LoadProgress,
        write: Callable[[str], None],
        line: Callable[[dict[str, Any]], str],
    ) -> None:
        """`listening`: bound; it stays open. `write`, `line`: of the access log."""
        self._listening, self._progress = listening, progress
        self._began = threading.Event()
        limits = ClientLimits()
        places = Places(limits.connections, limits.address_connections, lambda text: None, lambda why: None)
        connection: Any = partial(_LoadingConnection, limits, places, lambda why: None)
        config = uvicorn.Config(
            AccessLog(self._answer, write, line),
            http=connection,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=CLOSE_S,
        )
        self._places = places
        self._server = uvicorn.Server(config)  # signals reach it in the main thread only
        self._thread = threading.Thread(target=self._run, name="odmoe-loading", daemon=True)

    def __enter__(self) -> Self:
        self._listening.listen(socket.SOMAXCONN)
        self._thread.start()
        self._began.wait(BEGIN_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Any number of calls."""
        self._server.should_exit = True
        self._thread.join(END_S)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        asyncio.get_running_loop().set_exception_handler(ignore_exhaustion)
        # The duplicate is closed with the server; the socket itself goes on listening.
        copy = socket.socket(self._listening.family, self._listening.type, fileno=os.dup(self._listening.fileno()))
        serving = asyncio.create_task(self._server.serve([ListeningSocket(copy, self._places.shed)]))
        self._began.set()
        await serving
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Each connection ends with its response: the next request is for another server."""
        path, close = scope["path"], {"Connection": "close"}
        if path == "/health":
            response = Response(encode({"status": "ok"}), 200, close, "application/json")
        elif path == "/ready":
            answer = {"status": "not ready", "why": self._progress.text(), "progress": self._progress.facts()}
            response = Response(encode(answer), 503, {**close, "Retry-After": str(AGAIN_S)}, "application/json")
        else:
            error = ApiError(503, self._progress.text(), SERVER, code="loading", again_s=AGAIN_S)
            scope["state"]["record"].finish = error.code
            response = error.response(close, error_object(error, path, scope["state"]["record"].id))
        await response(scope, receive, send)
