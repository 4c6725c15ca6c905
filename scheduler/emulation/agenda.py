"""Actions at given moments of a real clock: a heap and a thread, as a simulator has a heap and a virtual clock."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from scheduler.emulation.expected_predictions import ExpectedPredictions
from scheduler.errors import DeadlineError

PATIENCE_S = 60.0
"""How long after its moment an action may end before `wait` raises DeadlineError."""

CAUTION_S = 0.25
"""Most time for which a cautious action is delayed because of a prediction that may still come."""

T = TypeVar("T")
_Act = Callable[[], object]
_log = logging.getLogger(__name__)


class Agenda:
    """Runs actions at their moments, one at a time, earliest first. Equal moments: in the order of the calls of `at`.

    `adopt`: called on the agenda's thread before each action, with the moment as of which the action counts. The thread
    starts with the first action.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, adopt: Callable[[float], None] | None = None
    ) -> None:
        self._clock = clock
        self._adopt = adopt or (lambda at: None)
        self._heap: list[tuple[float, int, float, _Act]] = []  # (due, number, as of, action)
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = self._ended = False
        self._cautious: dict[int, float] = {}  # number of an action -> the moment at which its caution ends
        self.expected: ExpectedPredictions | None = None
        """What cautious actions wait for."""

    def at(self, due: float, act: _Act, as_of: float | None = None, cautious: bool = False) -> None:
        """Run `act` when the clock reaches `due`, or at once if it has. It counts as of `due`, or of `as_of`.

        `cautious`: not while `expected` says that something earlier may still come, for at most `CAUTION_S`.
        """
        with self._changed:
            if not self._ended:  # while the last actions run, a new one is queued behind them
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

    def notify(self) -> None:
        """`expected` has changed."""
        with self._changed:
            self._changed.notify()

    def wait(self, due: float, act: Callable[[], T]) -> T:
        """Run `act` at `due`, cautiously, and wait for its result. Raises its error, or DeadlineError."""
        done: Future[T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(act())
            except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
                done.set_exception(error)

        self.at(due, run, cautious=True)
        deadline_s = PATIENCE_S + max(0.0, due - self._clock())
        try:
            return done.result(deadline_s)
        except TimeoutError:
            if not done.cancel():  # it has begun, so the caller needs its result
                return done.result(PATIENCE_S)
            raise DeadlineError(
                f"an action of emulated time did not run within {deadline_s:.0f} s; is the machine overloaded?"
            ) from None

    def close(self, deadline_s: float = 5.0) -> None:
        """Run the remaining actions at once, in order. Later ones run on the thread that calls `at`."""
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
        """Seconds for which the first action of the heap, which is due, is delayed further."""
        if number not in self._cautious or self.expected is None or self.expected.until() > due:
            return 0.0
        now = self._clock()
        until = self._cautious[number] = min(self._cautious[number], now + CAUTION_S)
        if until <= now:
            self.expected.give_up()
        return until - now

    def _do(self, as_of: float, act: _Act) -> None:
        self._adopt(as_of)
        try:
            act()
        except Exception:  # noqa: BLE001 - a dead thread would stop all later actions
            _log.exception("an action of emulated time failed")
