"""An answer as Python gets it: whole, or in chunks as they come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

from odmoe.api.names import named_as_keywords
from scheduler.closing import Closing
from scheduler.errors import RequestCancelledError, RequestError

if TYPE_CHECKING:
    from main_node.logprobs import TokenLogprobs
    from main_node.report import Report
    from odmoe.api.text_answer import TextAnswer


class Alternative(NamedTuple):
    """One of the most probable tokens at a place of the answer."""

    token: str
    logprob: float
    token_id: int


class Logprob(NamedTuple):
    """Of one token: the natural logarithm of the model's own probability for it, before temperature and penalties."""

    token: str
    logprob: float
    token_id: int
    top: tuple[Alternative, ...] = ()
    """The most probable tokens at this place, the most probable first."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one token added to the answer; `str(chunk)` is its text."""

    text: str
    """Empty if the token ends within a character, or may begin a stop text."""
    token_id: int
    logprob: Logprob | None = None
    """With `logprobs=N`."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer; `str(completion)` is its text."""

    text: str
    finish: str
    """Why it ended: `stop` (end-of-sequence token), `stop_text`, `length` (max_new_tokens) or `context` (full)."""
    prompt_tokens: int
    new_tokens: int
    token_ids: list[int]
    """The answer's tokens, without the prompt."""
    report: Report
    """The figures: times, recall, loads, memory (docs/reports.md)."""
    logprobs: list[Logprob] | None = None
    """With `logprobs=N`: of each token of the answer."""
    prompt_logprobs: list[Logprob | None] | None = None
    """With `prompt_logprobs=N`: of each token of the prompt. None for its first token, which follows nothing."""

    def __str__(self) -> str:
        return self.text


class Stream(Closing, Iterator[Chunk]):
    """Iterate over it for the answer's chunks. `completion` is the whole answer once it has ended.

    The end of a `with` block gives up an answer that has not ended: its loads stop at once.
    """

    def __init__(self, answer: TextAnswer, text_of: Callable[[int], str]) -> None:
        """`text_of`: gives the text of a token."""
        self._answer, self._text_of = answer, text_of
        self._prompt_logprobs: list[Logprob | None] | None = None
        self._chunks: list[Chunk] = []
        self._over = False
        self._given_up = threading.Event()

    def __next__(self) -> Chunk:
        """Raises PromptError, ConfigError, RequestError, ClusterError."""
        if self._over:
            raise StopIteration
        try:
            if self._given_up.is_set():
                raise RequestCancelledError("the answer was given up")
            chunk = self._next()
        except BaseException as error:
            self.close()
            if self._given_up.is_set() and isinstance(error, Exception) and not isinstance(error, StopIteration):
                raise RequestCancelledError("the answer was given up") from error  # whatever broke by that
            raise
        self._chunks.append(chunk)
        return chunk

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(chunk.text for chunk in self._chunks)

    @property
    def completion(self) -> Completion:
        """The whole answer. Raises RequestError before its end."""
        report = self._answer.report
        if report is None:
            raise RequestError(f"the answer has not ended: {len(self._chunks)} chunks came; iterate to its end first")
        return Completion(
            self.text,
            report.finish,
            report.prompt_tokens,
            report.new_tokens,
            [chunk.token_id for chunk in self._chunks],
            report,
            [chunk.logprob for chunk in self._chunks if chunk.logprob is not None] or None,
            self._prompt_logprobs,
        )

    def read(self) -> Completion:
        """The whole answer, when it has ended. Raises what iterating raises."""
        with self:
            for _ in self:
                pass
            return self.completion

    def cancel(self) -> None:
        """Give the answer up, from any thread at any time. The thread that iterates over it gets
        RequestCancelledError."""
        self._given_up.set()
        self._answer.cancel()

    def close(self) -> None:
        """Give the answer up, from the thread that iterates over it."""
        self._over = True
        self._answer.close()

    def _next(self) -> Chunk:
        """Raises StopIteration after the last one."""
        with named_as_keywords():
            text, step = next(self._answer)
        if step.prompt_logprobs is not None:
            self._prompt_logprobs = [one and self._with_texts(one) for one in step.prompt_logprobs]
        token = cast(int, step.token_id)  # a piece has one
        return Chunk(text, token, self._with_texts(step.logprobs) if step.logprobs else None)

    def _with_texts(self, of: TokenLogprobs) -> Logprob:
        """With the tokens' texts."""
        top = tuple(Alternative(self._text_of(token), logprob, token) for token, logprob in of.top)
        return Logprob(self._text_of(of.token_id), of.logprob, of.token_id, top)
