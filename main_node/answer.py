"""One answer as an iterator of tokens."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from main_node.report import Report
from main_node.request import Request
from scheduler.errors import RequestCancelledError, RequestFailedError


@dataclass(frozen=True, slots=True)
class Step:
    """One token of an answer."""

    token_id: int
    report: Report | None = None
    """With the last token."""


class Answer(Iterator[Step]):
    """Iterate over it for its tokens. `close` and `cancel` give it up, loads in flight included."""

    def __init__(self, give_up: Callable[[int], None], request: Request, steps: Generator[Step]) -> None:
        """`steps`: the token loop on `request`. `give_up`: ends what is under way for a request, by its number."""
        self.request = request
        self.number = request.number
        self._give_up = give_up
        self._steps = steps

    def __next__(self) -> Step:
        """Raises RequestCancelledError after `cancel`, RequestFailedError, ClusterError."""
        if self.request.cancelled.is_set():
            self.close()
            raise RequestCancelledError(f"request {self.number} was cancelled")
        try:
            return next(self._steps)
        except RequestFailedError as error:
            if self.request.cancelled.is_set():
                raise RequestCancelledError(f"request {self.number} was cancelled") from error
            raise

    def cancel(self) -> None:
        """Give the answer up, from any thread at any time. Its loads end at once, and a thread that waits for its next
        token gets RequestCancelledError."""
        self.request.cancelled.set()
        self._give_up(self.number)

    def close(self) -> None:
        """Give the answer up, from the thread that iterates over it."""
        self._steps.close()
