"""One answer as an iterator of tokens, and the end of answers that their clients have dropped."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass

from main_node.logprobs import TokenLogprobs
from main_node.report import Report
from main_node.request import Request
from scheduler.closing import Closing
from scheduler.errors import ClusterError, RequestCancelledError, RequestFailedError
from wire import runtime

_log = logging.getLogger(__name__)

CLOSE_S = 2.0
"""How long the end of a main node waits for token loops that are being closed."""


@dataclass(frozen=True, slots=True)
class Step:
    """One token of an answer; or, after the last token, the closing step with the report."""

    token_id: int | None
    """None in the closing step."""
    report: Report | None = None
    """In the closing step."""
    finish: str | None = None
    """With the last token: `Report.finish`."""
    logprobs: TokenLogprobs | None = None
    """Of the token, where the request asked for them."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """With the first token, where the request asked for them: of each token of the prompt. None for its first token,
    which follows nothing."""
    is_end: bool = False
    """The token ends the answer and is no part of its text: end-of-sequence, or one of `stop_token_ids`."""
    cached_tokens: int = 0
    """With the first token: `Report.cached_tokens`."""


def step_of(request: Request, token: int, finish: str | None) -> Step:
    """Of the last token of the answer so far."""
    logprobs = request.logprobs.popleft() if request.logprobs else None
    scores = request.prompt_scores if len(request.sequence.tokens) == 1 else None
    is_end = finish == "stop" and token in request.chooser.last_tokens
    cached = request.cached_tokens if len(request.sequence.tokens) == 1 else 0
    return Step(token, None, finish, logprobs, tuple(scores.found) if scores is not None else None, is_end, cached)


def collect(answer: Iterable[Step]) -> tuple[list[int], Report]:
    """All tokens of an answer, and its report. Raises what iterating raises, ClusterError for an answer that ends
    without a report."""
    tokens: list[int] = []
    report = None
    for step in answer:
        if step.token_id is not None:
            tokens.append(step.token_id)
        report = step.report
    if report is None:
        raise ClusterError(f"the answer ended after {len(tokens)} tokens without its report; it was closed")
    return tokens, report


class Answer(Closing, Iterator[Step]):
    """Iterate over it for its tokens. `close`, `cancel` and the end of a `with` block give it up, loads in flight
    included. So does dropping the last reference to it, a moment later."""

    def __init__(self, give_up: Callable[[Request], None], request: Request, steps: Generator[Step]) -> None:
        """`steps`: the token loop on `request`. `give_up`: ends what is under way for a request."""
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
        self._give_up(self.request)

    def close(self) -> None:
        """Give the answer up, from the thread that iterates over it."""
        self._steps.close()


class TokenLoops:
    """Closes the token loops of answers that were dropped, on a thread of its own. Thread-safe.

    The answer's finalizer only puts its loop on a queue: it may run in any thread, at any moment, with any lock held.
    """

    def __init__(self) -> None:
        self._dropped: runtime.SimpleQueue[tuple[int, Generator[Step]] | None] = runtime.SimpleQueue()
        self._lock = runtime.Lock()
        self._thread: runtime.Thread | None = None

    def add(self, answer: Answer, steps: Generator[Step]) -> None:
        """Close `steps` when nothing refers to `answer` any more."""
        weakref.finalize(answer, self._dropped.put, (answer.number, steps)).atexit = False
        with self._lock:
            if self._thread is None:
                self._thread = runtime.Thread(target=self._close_dropped, name="odmoe-answers", daemon=True)
                self._thread.start()

    def _close_dropped(self) -> None:
        while (dropped := self._dropped.get()) is not None:
            number, steps = dropped
            try:
                steps.close()
            except Exception:  # noqa: BLE001 - the others are still to be closed
                _log.exception("closing the dropped request %d failed", number)
            del dropped, steps  # the next one may be long in coming

    def close(self) -> None:
        """Close the loops that were dropped before this call, and end the thread. Waits for it for `CLOSE_S`."""
        self._dropped.put(None)
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not runtime.current_thread():
            thread.join(CLOSE_S)
