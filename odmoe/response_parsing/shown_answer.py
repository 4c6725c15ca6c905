"""Answers of chats as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from odmoe.response_parsing.answer_parser import Delta
from odmoe.response_parsing.forms import THINK, find_form, marking_tokens
from odmoe.response_parsing.parsers import make_parser
from odmoe.text import StoppedText

if TYPE_CHECKING:
    from odmoe.api.text_answer import Piece

_END = 64
"""Tokens at a prompt's end that may begin the reasoning."""


class ShownAnswer:
    """Reasoning stands between `<think>` and `</think>`, also of families that mark it with special tokens, which are
    no part of an answer's text. What other families write is shown as it is."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: tuple[str, ...]) -> None:
        form = find_form(tokenizer)
        shown = marking_tokens(tokenizer, form)
        self._marked = StoppedText(tokenizer, stop, prompt, shown) if shown else None
        end = tokenizer.decode(list(prompt[-_END:])) if shown else ""
        self._parser = make_parser(form, end, [])
        self._is_reasoning = False

    def push(self, piece: Piece) -> str:
        """What the piece adds."""
        if self._marked is None:
            return piece.text
        step = piece.step
        text = "" if step.token_id is None or step.is_end else self._marked.push(step.token_id)
        deltas = self._parser.push(text + (self._marked.flush() if step.finish else ""))
        if step.finish:
            deltas += self._parser.finish(step.finish in ("length", "context"))
        return "".join(self._text_of(delta) for delta in deltas)

    def _text_of(self, delta: Delta) -> str:
        is_reasoning = "reasoning_content" in delta
        mark = ""
        if is_reasoning != self._is_reasoning:
            mark = f"{THINK[0]}\n" if is_reasoning else f"\n{THINK[1]}\n\n"
        self._is_reasoning = is_reasoning
        return mark + str(delta.get("reasoning_content", delta.get("content", "")))
