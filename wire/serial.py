"""A thread that runs jobs one after the other, so that a handler can return at once."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from scheduler.errors import LinkError
from wire import runtime
from wire.lent_threads import LentThreads

MAX_JOBS = 100_000
_log = logging.getLogger(__name__)
_Job = tuple[Callable[..., object], tuple[Any, ...]]


class SerialThread:
    """Runs jobs in the order of submission and calls `on_error(error)` with an exception that escapes one.

    `lent`: threads that may run the jobs given to `lend`.
    """

    def __init__(self, name: str, on_error: Callable[[Exception], None], lent: LentThreads | None = None) -> None:
        self._lent = lent
        self._jobs: runtime.SimpleQueue[_Job | None] = runtime.SimpleQueue()
        self._on_error = on_error
        self._closed = False
        self._thread = runtime.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[..., object], *args: Any) -> None:
        """Queue a job. Raises LinkError when closed or when MAX_JOBS are waiting."""
        if self._closed or self._jobs.qsize() > MAX_JOBS:
            raise LinkError(f"{self._thread.name} {'has stopped' if self._closed else 'has too much to do'}")
        self._jobs.put((job, args))

    def lend(self, job: Callable[..., object], *args: Any, is_due: Callable[[], bool] = lambda: True) -> None:
        """Have a lent thread run a job, where one is lent; else as `submit`. Only lent jobs keep their order. One that
        no lent thread has run is done here, if it `is_due` still."""

        def run() -> None:
            self._run_job(job, args)

        def take_back() -> None:
            with contextlib.suppress(LinkError):  # closed meanwhile, which drops its jobs
                if is_due():
                    self.submit(job, *args)

        if self._lent is None or not self._lent.offer(run, take_back):
            self.submit(job, *args)

    def close(self, deadline_s: float = 5.0) -> bool:
        """Finish the running job, drop the others, stop. False if the thread did not stop in time."""
        self._closed = True
        self._jobs.put(None)
        if runtime.current_thread() is not self._thread:
            self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None or self._closed:
                return
            try:
                self._run_job(*job)
            except BaseException:  # noqa: BLE001 - the end of a lent thread's caller, say, but not of this one
                _log.exception("%s", self._thread.name)

    def _run_job(self, job: Callable[..., object], args: tuple[Any, ...]) -> None:
        try:
            job(*args)
        except Exception as error:  # noqa: BLE001 - a dead thread would look like a slow one
            _log.debug("%s", self._thread.name, exc_info=True)
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        try:
            self._on_error(error)
        except Exception as second:  # noqa: BLE001 - likewise; most often the stream for the report is gone
            _log.warning("%s: %s; that could not be told: %s", self._thread.name, error, second)
