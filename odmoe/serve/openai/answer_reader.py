"""Reads one choice of a chat: from its tokens to the deltas of a message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from odmoe.response_parsing.answer_parser import AnswerParser, Delta
from odmoe.response_parsing.parsers import join_deltas
from odmoe.text import StoppedText

if TYPE_CHECKING:
    from odmoe.serve.openai.parts import Part


class AnswerReader:
    """What was given stays: an answer may be read while it comes."""

    def __init__(self, parser: AnswerParser, marked: StoppedText | None) -> None:
        """`marked`: makes the text with the special tokens that mark something. None: there are none."""
        self._parser, self._marked = parser, marked
        self.has_calls = False

    def push(self, part: Part) -> list[Delta]:
        """What the part adds."""
        text = part.text if self._marked is None else self._marked_text(part, self._marked)
        found = self._parser.push(text) if text else []
        if part.finish is not None:
            found += self._parser.finish(part.reason == "length")
        self.has_calls |= any("tool_calls" in delta for delta in found)
        return join_deltas(found)

    def _marked_text(self, part: Part, marked: StoppedText) -> str:
        text = "".join(
            marked.push(step.token_id) for step in part.steps if step.token_id is not None and not step.is_end
        )
        return text + (marked.flush() if part.finish is not None else "")
