"""An answer for asyncio. A thread of its own reads it, for as long as the answer lasts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from types import TracebackType
from typing import Self

from odmoe.api.completion import Chunk, Completion, Stream
from scheduler.errors import RequestCancelledError, RequestError

END_S = 10.0
"""Longest wait for the thread of an answer that was given up. It ends by itself later."""
AHEAD = 64
"""Chunks that are read before they are awaited. Then the thread waits, and so does the answer: it is computed no
further."""
LOOK_S = 5.0
"""Between two looks of a waiting thread whether the event loop is still there."""


class AsyncStream(AsyncIterator[Chunk]):
    """Iterate over it for the answer's chunks. `completion` is the whole answer once it has ended.

    The answer begins with the first chunk that is awaited. It is given up at once, and its thread has ended, when the
    awaiting task is cancelled, at the end of an `async with` block, or when nothing refers to it any more.
    """

    def __init__(self, begin: Callable[[], Stream]) -> None:
        """`begin`: called in the thread."""
        self._reader = _Reader(begin)
        self._chunks = _chunks(self._reader)  # it does not refer to this object, so that dropping this ends the answer
        self._awaited = False

    async def __anext__(self) -> Chunk:
        """Raises PromptError, ConfigError, RequestError, ClusterError."""
        self._awaited = True
        try:
            return await anext(self._chunks)
        finally:
            self._awaited = False

    @property
    def completion(self) -> Completion:
        """The whole answer. Raises RequestError before its end."""
        if self._reader.completion is None:
            raise RequestError("the answer has not ended; iterate to its end first")
        return self._reader.completion

    async def read(self) -> Completion:
        """The whole answer, when it has ended. Raises what iterating raises."""
        async with self:
            async for _ in self:
                pass
            return self.completion

    def cancel(self) -> None:
        """Give the answer up, from any task or thread. The task that awaits a chunk gets RequestCancelledError."""
        self._reader.cancel()

    async def aclose(self) -> None:
        """Give the answer up, from any task, and wait for its thread's end. A task that awaits a chunk meanwhile gets
        RequestCancelledError."""
        await self._reader.end()
        if not self._awaited:  # else the task that awaits closes it
            await self._chunks.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class _Reader:
    """Reads a stream in a thread. What comes goes to `inbox`: chunks, then an error or None."""

    def __init__(self, begin: Callable[[], Stream]) -> None:
        self._begin = begin
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self._thread: threading.Thread | None = None
        self._room = threading.Semaphore(AHEAD)
        self.cancelled = False
        self.completion: Completion | None = None

    def start(self) -> None:
        """Raises RequestCancelledError."""
        if self.cancelled:
            raise RequestCancelledError("the answer was given up")
        self._loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[Chunk | BaseException | None] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="odmoe-async-answer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        outcome: BaseException | None = None
        try:
            with self._open() as stream:
                for chunk in stream:
                    self._wait_for_room()
                    self._tell(self._inbox.put_nowait, chunk)
                self.completion = stream.completion
        except BaseException as error:  # noqa: BLE001 - it is raised where the answer is awaited
            outcome = error
        self._tell(self._inbox.put_nowait, outcome)
        self._tell(self._ended.set)

    def _open(self) -> Stream:
        stream = self._begin()
        with self._lock:
            self._stream = stream
            if self.cancelled:
                stream.cancel()
        return stream

    def _wait_for_room(self) -> None:
        while not self._room.acquire(timeout=LOOK_S):
            if self._loop.is_closed():
                self.cancel()

    def _tell(self, call: Callable[..., object], *values: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *values)
        except RuntimeError:  # the loop is closed, so nobody awaits this any more
            self.cancel()

    async def take(self) -> Chunk | None:
        """The next chunk; None after the last one. Raises what ended the answer."""
        item = await self._inbox.get()
        self._room.release()
        if self.cancelled:
            raise RequestCancelledError("the answer was given up")
        if isinstance(item, BaseException):
            raise item
        return item

    def cancel(self) -> None:
        """Give the answer up, from any thread."""
        with self._lock:
            self.cancelled, stream = True, self._stream
        self._room.release()  # the thread may wait for it
        if stream is not None:
            stream.cancel()

    async def end(self) -> None:
        """Give the answer up, and wait for the thread's end for at most `END_S`."""
        self.cancel()
        if self._thread is None:
            return
        try:
            await asyncio.wait_for(self._ended.wait(), END_S)
        except TimeoutError:
            return
        self._thread.join(END_S)  # it has nothing left to do


async def _chunks(reader: _Reader) -> AsyncGenerator[Chunk]:
    reader.start()
    try:
        while (chunk := await reader.take()) is not None:
            yield chunk
    finally:
        await reader.end()
