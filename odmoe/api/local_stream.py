"""An answer of nodes that this process has started or joined, as a stream of chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from odmoe.api.completion import Alternative, Chunk, Ending, Logprob, Stream
from odmoe.api.names import named_as_keywords

if TYPE_CHECKING:
    from main_node.logprobs import TokenLogprobs
    from odmoe.api.text_answer import TextAnswer


class LocalStream(Stream):
    """See Stream."""

    def __init__(self, answer: TextAnswer, text_of: Callable[[int], str]) -> None:
        """`text_of`: gives the text of a token."""
        super().__init__()
        self._answer, self._text_of = answer, text_of
        self._prompt_logprobs: list[Logprob | None] | None = None

    def _next(self) -> Chunk:
        with named_as_keywords():
            text, step = next(self._answer)
        if step.prompt_logprobs is not None:
            self._prompt_logprobs = [one and self._named(one) for one in step.prompt_logprobs]
        return Chunk(text, step.token_id, self._named(step.logprobs) if step.logprobs else None)

    def _ending(self) -> Ending | None:
        report = self._answer.report
        if report is None:
            return None
        return Ending(report.finish, report.prompt_tokens, report.new_tokens, report, self._prompt_logprobs)

    def _named(self, of: TokenLogprobs) -> Logprob:
        """With the tokens' texts."""
        top = tuple(Alternative(self._text_of(token), logprob, token) for token, logprob in of.top)
        return Logprob(self._text_of(of.token_id), of.logprob, of.token_id, top)

    def _cancel(self) -> None:
        self._answer.cancel()

    def _close(self) -> None:
        self._answer.close()
