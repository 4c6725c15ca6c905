"""Answers are computed in threads, and reach the event loop through a queue."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from odmoe.api.text_answer import Piece
from scheduler.errors import QueueFullError, RequestCancelledError

if TYPE_CHECKING:
    from main_node.report import Report
    from odmoe.api.text_answer import TextAnswer

AnswerFactory = Callable[[], "TextAnswer"]
OnPut = Callable[["AnswerEvent"], None]
"""Called with each event, in the thread that puts it."""


class AnswerEvent(NamedTuple):
    """A piece of one answer of a request, or its end."""

    choice: int
    what: Piece | Report | Exception
    """A piece; at the end its report, or why there is none."""
    at: float
    """When, by `time.perf_counter`."""


class EventQueue:
    """From any thread to the event loop. What has piled up arrives together."""

    def __init__(self, on_put: OnPut = lambda item: None) -> None:
        self._on_put = on_put
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._lock = threading.Lock()
        self._items: list[AnswerEvent] = []
        self._failure: Exception | None = None

    def put(self, item: AnswerEvent) -> None:
        """From any thread."""
        self._on_put(item)
        with self._lock:
            self._items.append(item)
            wake = len(self._items) == 1
        if wake:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and everybody on it
                self._loop.call_soon_threadsafe(self._ready.set)

    def fail(self, error: Exception) -> None:
        """From the event loop: whoever takes gets `error`, after what has come."""
        self._failure = self._failure or error
        self._ready.set()

    async def take(self) -> list[AnswerEvent]:
        """At least one item. Raises what `fail` was given, after the items that had come before."""
        items: list[AnswerEvent] = []
        while not items:  # one that comes just now may wake this twice
            if self._failure is None:
                await self._ready.wait()
            self._ready.clear()
            with self._lock:
                items, self._items = self._items, []
            if self._failure is not None:
                items = [one for one in items if not isinstance(one.what, Exception)]  # they follow from it
                if not items:
                    raise self._failure
        return items


class RequestAnswers:
    """The answers that one HTTP request asks for, in order, several at once."""

    def __init__(self, factories: list[AnswerFactory], on_put: OnPut = lambda item: None) -> None:
        self.events = EventQueue(on_put)
        self.count = len(factories)
        self.threads = 0
        """That work on it, or are about to. The pool's."""
        self._left = deque(enumerate(factories))
        self._lock = threading.Lock()
        self._open: set[TextAnswer] = set()
        self._given_up = False

    @property
    def left_count(self) -> int:
        """How many have not begun, and are not given up."""
        with self._lock:
            return 0 if self._given_up else len(self._left)

    def work(self) -> None:
        """In each of the request's threads: one answer after the other."""
        while (next_one := self._next()) is not None:
            index, make = next_one
            try:
                report = self._answer(index, make)
            except Exception as error:  # noqa: BLE001 - whatever it is, the client is told of it
                self.events.put(AnswerEvent(index, error, time.perf_counter()))
            except BaseException as error:  # a panic of a library in Rust is no Exception
                defect = RuntimeError(f"{type(error).__name__}: {error}")
                self.events.put(AnswerEvent(index, defect, time.perf_counter()))
                raise
            else:
                self.events.put(AnswerEvent(index, report, time.perf_counter()))

    def _next(self) -> tuple[int, AnswerFactory] | None:
        with self._lock:
            return self._left.popleft() if self._left and not self._given_up else None

    def _answer(self, index: int, make: AnswerFactory) -> Report | Exception:
        with make() as answer:
            with self._lock:
                self._open.add(answer)
                if self._given_up:
                    answer.cancel()
            try:
                for piece in answer:
                    self.events.put(AnswerEvent(index, piece, time.perf_counter()))
            finally:
                with self._lock:
                    self._open.discard(answer)
            return answer.report or RequestCancelledError("the answer was given up")

    def cancel(self) -> None:
        """Give up every answer, from any thread: their loads end at once."""
        with self._lock:
            self._given_up = True
            given_up = self._open.copy()
        for answer in given_up:
            answer.cancel()


class AnswerPool:
    """The threads of all answers, as many as the cluster answers and lets wait."""

    def __init__(self, parallel: int, queue: int) -> None:
        self.parallel, self.places = parallel, parallel + queue
        self._pool = ThreadPoolExecutor(self.places, "odmoe-request")
        self._lock = threading.Condition()
        self._working: list[RequestAnswers] = []
        self._taken = 0
        self._closed = False

    def start(self, factories: list[AnswerFactory], on_put: OnPut = lambda item: None) -> RequestAnswers:
        """From the event loop. Raises QueueFullError if no thread is free."""
        answers = RequestAnswers(factories, on_put)
        with self._lock:
            if self._taken >= self.places:
                raise QueueFullError(f"the queue is full: {self._taken} answers are under way or wait; try again later")
            self._working.append(answers)
            self._give_thread(answers)
            self._spread()
        return answers

    def _spread(self) -> None:
        """A request's further threads are those that the cluster has nothing else for: nobody is refused for them."""
        while self._taken < self.parallel:
            wanting = [one for one in self._working if one.left_count > 0 and one.threads < one.count]
            if not wanting:
                return
            self._give_thread(min(wanting, key=lambda one: one.threads))

    def _give_thread(self, answers: RequestAnswers) -> None:
        answers.threads += 1
        self._taken += 1
        self._pool.submit(self._work, answers)

    def _work(self, answers: RequestAnswers) -> None:
        try:
            answers.work()
        finally:
            with self._lock:
                answers.threads -= 1
                self._taken -= 1
                if not answers.threads:
                    self._working.remove(answers)
                if not self._closed:
                    self._spread()
                self._lock.notify_all()

    @property
    def busy_threads(self) -> int:
        """How many threads answer just now."""
        with self._lock:
            return self._taken

    def close(self, within_s: float) -> bool:
        """Wait for the threads' last answers, which were given up. Returns whether all have ended."""
        with self._lock:
            self._closed = True
        self._pool.shutdown(wait=False)
        with self._lock:
            return self._lock.wait_for(lambda: self._taken == 0, within_s)
