"""Threads that would only wait, lent to the nodes of their process."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator

from wire import runtime

Job = Callable[[], object]


class LentThreads:
    """The threads that wait for layers, in a process that also holds workers. They compute what they wait for: that
    saves two hand-overs for each expert, and torch a second pool of threads. Thread-safe.

    Jobs run one at a time, in the order in which they were offered. A job must not raise.
    """

    def __init__(self) -> None:
        self._jobs: deque[tuple[Job, Job]] = deque()
        self._lent = 0
        self._running = False
        self._changed = runtime.Condition(runtime.Lock())

    @contextlib.contextmanager
    def lend(self) -> Iterator[None]:
        """The calling thread is about to wait, in `run_until`. Jobs that no lent thread has run by the end go back."""
        with self._changed:
            self._lent += 1
        try:
            yield
        finally:
            with self._changed:
                self._lent -= 1
                left = [] if self._lent else list(self._jobs)
                if left:
                    self._jobs.clear()
            for _, take_back in left:
                take_back()

    def offer(self, job: Job, take_back: Job) -> bool:
        """Have a lent thread run a job; `take_back` is called if none has by the time that the last one leaves. False
        where no thread is lent."""
        with self._changed:
            if not self._lent:
                return False
            self._jobs.append((job, take_back))
            self._changed.notify()
            return True

    def run_until(self, done: Callable[[], bool], within_s: float) -> bool:
        """Run jobs until `done()`; `wake` has it asked again. False where that took longer."""
        end = runtime.monotonic() + within_s
        with self._changed:
            while not done():
                if self._jobs and not self._running:
                    self._run_next()
                elif not self._changed.wait(end - runtime.monotonic()):
                    break
            if self._jobs:  # another waiting thread has to run them
                self._changed.notify()
        return done()

    def _run_next(self) -> None:
        """Called with the lock, which the job does without."""
        job, _ = self._jobs.popleft()
        self._running = True
        self._changed.release()
        try:
            job()
        finally:
            self._changed.acquire()
            self._running = False

    def wake(self) -> None:
        """What a lent thread waits for may have come about."""
        with self._changed:
            self._changed.notify_all()
