"""One answer as text, piece by piece. Any thread may cancel it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

from odmoe.clusters.retries import RetriedAnswer, Retrying
from scheduler.closing import Closing

if TYPE_CHECKING:
    from main_node.answer import Step
    from main_node.report import Report
    from main_node.sampling import GenerateOptions
    from odmoe.clusters.base import Answering, Cluster


class Piece(NamedTuple):
    """What one token added to the answer."""

    text: str
    """The text that the token completes: empty within a character, or while it may begin a stop text."""
    step: Step
    """The token, and with the last one why the answer ended."""


class TextAnswer(Closing, Iterator[Piece]):
    """Iterate over it for its pieces, one a token. `report` is there after the last one.

    The end of a `with` block gives up an answer that has not ended.
    """

    def __init__(
        self,
        cluster: Cluster,
        tokenizer: Any,
        prompt: list[int],
        max_new_tokens: int,
        how: GenerateOptions,
        retrying: Retrying = Retrying(),
    ) -> None:
        self.report: Report | None = None
        """The figures, once the answer has ended."""
        self._given_up = threading.Event()
        self._under_way: set[Answering] = set()
        retried = RetriedAnswer(cluster, retrying, self._given_up, self._under_way)
        self._pieces = self._read(retried, tokenizer, prompt, max_new_tokens, how)

    def _read(
        self, retried: RetriedAnswer, tokenizer: Any, prompt: list[int], max_new_tokens: int, how: GenerateOptions
    ) -> Iterator[Piece]:
        from odmoe.text import StoppedText

        text = StoppedText(tokenizer, how.get("stop", ()), prompt)
        with closing(retried.steps(prompt, max_new_tokens, how)) as steps:
            for step in steps:
                if step.token_id is not None:
                    piece = "" if step.is_end else text.push(step.token_id)
                    yield Piece(piece + (text.flush() if step.finish else ""), step)
                self.report = step.report

    def __next__(self) -> Piece:
        """Raises PromptError, ConfigError, RequestError, ClusterError."""
        return next(self._pieces)

    def cancel(self) -> None:
        """Give the answer up, from any thread at any time: its loads end at once. The thread that iterates over it gets
        RequestError."""
        self._given_up.set()
        for steps in self._under_way.copy():
            steps.cancel()

    def close(self) -> None:
        """Give the answer up, from the thread that iterates over it."""
        self._given_up.set()
        self._pieces.close()  # type: ignore[attr-defined]
