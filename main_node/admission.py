"""Which requests are answered at once, and which wait for a place."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from main_node.kept_prompts import KVKeeping
from main_node.request import Request
from scheduler.errors import DeadlineError, QueueFullError
from wire import runtime


@dataclass(frozen=True, slots=True)
class Sharing:
    """How several requests share the main node."""

    parallel: int = 8
    """Most requests answered at once."""
    queue: int = 64
    """Most requests that wait for one of these to end."""
    prefill_chunk: int = 256
    """Most tokens of prompts that a step reads while others are answered; 0: no bound."""
    batch_dense: bool = False
    """Multiply the rows of several requests as one product, outside of the experts."""
    context: int | None = None
    """Most tokens of prompt and answer, if that is less than the model's limit."""
    launch_s: float = 600.0
    """Longest wait for the shadow, for a place and for a step."""
    keeping: KVKeeping | None = None
    """Of the KV caches of earlier prompts; None: nothing is kept."""


class Admission:
    """At most `sharing.parallel` requests at once; up to `sharing.queue` others wait in order, for at most
    `sharing.launch_s` each. `paused_s`: seconds so far that do not count, since requests waited for missing workers."""

    def __init__(self, sharing: Sharing, paused_s: Callable[[], float] = lambda: 0.0) -> None:
        self.parallel, self.queue = sharing.parallel, sharing.queue
        self._deadline_s, self._paused_s = sharing.launch_s, paused_s
        self._changed = runtime.Condition()
        self._open: set[Request] = set()
        self._waiting: deque[Request] = deque()

    @contextlib.contextmanager
    def place(self, request: Request) -> Iterator[Callable[[], None]]:
        """Around everything that the request needs, after a wait for its place. Yields a function that gives the place
        up before the end.

        Raises QueueFullError, DeadlineError, RequestCancelledError.
        """
        with self._changed:
            self._take(request)
        try:
            yield functools.partial(self._leave, request)
        finally:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        with self._changed:
            self._open.discard(request)
            self._changed.notify_all()

    def _take(self, request: Request) -> None:
        if self._waiting or len(self._open) >= self.parallel:
            if len(self._waiting) >= self.queue:
                raise QueueFullError(
                    f"the queue is full: {len(self._open)} answered at once and {len(self._waiting)} waiting; try "
                    "again later, or start the cluster with a larger --parallel or --queue"
                )
            self._wait(request)
        self._open.add(request)

    def _wait(self, request: Request) -> None:
        def has_turn() -> bool:
            first = self._waiting[0] is request and len(self._open) < self.parallel
            return first or request.cancelled.is_set()

        self._waiting.append(request)
        try:
            in_time, left_s, before_s = False, self._deadline_s, self._paused_s()
            while not in_time and left_s > 0:
                in_time = self._changed.wait_for(has_turn, left_s)
                paused_s = self._paused_s()
                left_s, before_s = paused_s - before_s, paused_s
            request.check_wanted()
        finally:  # an interrupted one, too
            self._waiting.remove(request)
            self._changed.notify_all()
        if not in_time:
            raise DeadlineError(
                f"request {request.number} waited {self._deadline_s:g} s for one of {self.parallel} places; send "
                "fewer at once, or start the cluster with a larger --parallel"
            )

    def counts(self) -> tuple[int, int]:
        """How many requests are being answered, and how many wait."""
        with self._changed:
            return len(self._open), len(self._waiting)

    def requests(self) -> list[Request]:
        """Those that have a place."""
        with self._changed:
            return list(self._open)

    def wake_waiting(self) -> None:
        """A waiting request may have been cancelled."""
        with self._changed:
            self._changed.notify_all()
