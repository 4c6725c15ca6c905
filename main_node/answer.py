"""One request, as whoever asked for it sees it: an iterator of tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from main_node.engine.engine import Engine
from main_node.engine.sequence import Sequence
from main_node.report import Report
from main_node.sampling import Chooser
from scheduler.errors import RequestCancelledError, RequestFailedError


@dataclass(frozen=True, slots=True)
class Step:
    """One token of an answer; the last one carries the report."""

    token_id: int
    report: Report | None = None


class Answer(Iterator[Step]):
    """One request. Iterating gives its tokens; `close` and `cancel` give it up, loads under way included."""

    def __init__(
        self,
        engine: Engine,
        number: int,
        sequence: Sequence,
        chooser: Chooser,
        stopped: Callable[[int], bool] | None,
        steps: Callable[[Answer], Iterator[Step]],
    ) -> None:
        self.number = number
        self.sequence = sequence
        self.chooser = chooser
        self.stopped = stopped
        self._engine = engine
        self._steps = steps(self)
        self.cancelled = threading.Event()

    def __next__(self) -> Step:
        """Raises RequestCancelledError after `cancel`, RequestFailedError, ClusterError."""
        if self.cancelled.is_set():
            self.close()
            raise RequestCancelledError(f"request {self.number} was cancelled")
        try:
            return next(self._steps)
        except RequestFailedError as error:
            if self.cancelled.is_set():
                raise RequestCancelledError(f"request {self.number} was cancelled") from error
            raise

    def cancel(self) -> None:
        """From any thread, at any time: its loads end at once, and whoever waits for its next token hears of it."""
        self.cancelled.set()
        self._engine.close_request(self.number)

    def close(self) -> None:
        """Give the answer up, from the thread that iterates over it."""
        self._steps.close()  # type: ignore[attr-defined]
