"""What is to happen at given moments of a real clock: a heap and a thread, as a simulator's heap and its clock."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from scheduler.errors import DeadlineError

PATIENCE_S = 60.0
"""How long after its moment a piece of work may take to be done, before whoever waits for it gives up."""

CAUTION_S = 0.25
"""Most time by which something is put off because what counts before it may still come."""

T = TypeVar("T")
_Act = Callable[[], object]
_log = logging.getLogger(__name__)


class Awaiting(Protocol):
    """See `scheduler.emulation.expected_predictions.ExpectedPredictions`."""

    def until(self) -> float: ...

    def give_up(self) -> None: ...


class _Nothing:
    def until(self) -> float:
        return math.inf

    def give_up(self) -> None:
        pass


class Agenda:
    """Acts at their moments, one at a time, the earliest first; of two for one moment the first that was put down.

    `adopt`: told, on the agenda's thread, as of when each act counts. The thread starts with the first act.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, adopt: Callable[[float], None] | None = None
    ) -> None:
        self._clock = clock
        self._adopt = adopt or (lambda at: None)
        self._heap: list[tuple[float, int, float, _Act]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = self._ended = False
        self._cautious: dict[int, float] = {}
        self.awaited: Awaiting = _Nothing()

    def at(self, due: float, act: _Act, as_of: float | None = None, cautious: bool = False) -> None:
        """Do this when the clock says `due`, or at once where that has passed; it counts as of then, or of `as_of`.

        `cautious`: not while `awaited` says that something earlier is still to come, for at most `CAUTION_S`.
        """
        with self._changed:
            if not self._ended:  # while the last are being done, a new one takes its turn behind them
                number = next(self._order)
                heapq.heappush(self._heap, (due, number, due if as_of is None else as_of, act))
                if cautious:
                    self._cautious[number] = math.inf
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="odmoe-agenda", daemon=True)
                    self._thread.start()
                elif self._heap[0][3] is act:
                    self._changed.notify()
                return
        self._do(due if as_of is None else as_of, act)

    def stir(self) -> None:
        """What `awaited` says has changed."""
        with self._changed:
            self._changed.notify()

    def wait(self, due: float, act: Callable[[], T]) -> T:
        """Have it done at `due`, cautiously, and wait for it. Raises what it raises, or DeadlineError."""
        done: Future[T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(act())
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                done.set_exception(error)

        self.at(due, run, cautious=True)
        late = PATIENCE_S + max(0.0, due - self._clock())
        try:
            return done.result(late)
        except TimeoutError:
            if not done.cancel():  # it is done, or has been begun: whoever waits must know of it
                return done.result(PATIENCE_S)
            raise DeadlineError(
                f"the agenda did not come to something within {late:.0f} s; is the machine overloaded?"
            ) from None

    def close(self, deadline_s: float = 5.0) -> None:
        """What is left is done at once, in order, and what comes later by whoever brings it."""
        with self._changed:
            self._closed = True
            self._ended = self._ended or self._thread is None
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(deadline_s)

    def _run(self) -> None:
        while (item := self._next()) is not None:
            self._do(*item)

    def _next(self) -> tuple[float, _Act] | None:
        with self._changed:
            while True:
                if not self._heap:
                    if self._closed:
                        self._ended = True
                        return None
                    self._changed.wait()
                    continue
                left = self._heap[0][0] - self._clock()
                if left <= 0:
                    left = self._caution_s(*self._heap[0][:2])
                if left <= 0 or self._closed:
                    _, number, as_of, act = heapq.heappop(self._heap)
                    self._cautious.pop(number, None)
                    return as_of, act
                self._changed.wait(min(left, threading.TIMEOUT_MAX))

    def _caution_s(self, due: float, number: int) -> float:
        """How much longer the first in the heap, which is due, is put off."""
        if number not in self._cautious or self.awaited.until() > due:
            return 0.0
        now = self._clock()
        until = self._cautious[number] = min(self._cautious[number], now + CAUTION_S)
        if until <= now:
            self.awaited.give_up()
        return until - now

    def _do(self, as_of: float, act: _Act) -> None:
        self._adopt(as_of)
        try:
            act()
        except Exception:  # noqa: BLE001 - a dead thread would stop all that is to come
            _log.exception("something on the agenda failed")
