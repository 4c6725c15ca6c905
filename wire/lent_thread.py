"""A thread that would only wait, lent to the nodes of its process."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator

Job = Callable[[], object]


class LentThread:
    """The thread that waits for a layer, in a process that also holds workers. It computes what it waits for: that
    saves two hand-overs for each expert, and torch a second pool of threads. Thread-safe.

    Jobs run one at a time, in the order in which they were offered. A job must not raise.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, Callable[[Job], object]] | None] = queue.SimpleQueue()
        self._lent = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """The calling thread is about to wait, in `run_until`. What it has not run by the end goes back to its owner."""
        with self._lock:
            self._lent = True
        try:
            yield
        finally:
            with self._lock:
                self._lent = False
            self._give_back()

    def offer(self, job: Job, otherwise: Callable[[Job], object]) -> bool:
        """Have the lent thread run a job; `otherwise(job)` if it leaves before. False where no thread is lent."""
        with self._lock:
            if self._lent:
                self._jobs.put((job, otherwise))
            return self._lent

    def run_until(self, done: threading.Event, within_s: float) -> bool:
        """Run jobs until `done` is set. Whoever sets it calls `wake` then. False where that took longer."""
        end = time.monotonic() + within_s
        while not done.is_set():
            try:
                offered = self._jobs.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return done.is_set()
            if offered is not None:
                offered[0]()
        return True

    def wake(self) -> None:
        """`run_until` looks at its event again."""
        self._jobs.put(None)

    def _give_back(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                offered = self._jobs.get_nowait()
                if offered is not None:
                    job, otherwise = offered
                    otherwise(job)
