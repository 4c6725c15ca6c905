"""What a conversation shows: the answer on standard output, everything else on standard error."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack

from odmoe.conversation.chat_model import Delta, Figures
from odmoe.conversation.word_wrap import WordWrap
from odmoe.terminal import Terminal

_CONTROL = {code: None for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}
"""What a terminal would obey. A model's answer is text."""


class Screen:
    """Both streams, whether or not they are one terminal."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self._wrap: WordWrap | None = None
        self._is_terminal = sys.stdout.isatty()
        self._at_start, self._is_thinking = True, False

    @contextlib.contextmanager
    def answer(self) -> Iterator[AnswerView]:
        """A spinner until the first piece of an answer; at the end a new line."""
        with ExitStack() as waiting:
            waiting.enter_context(self.terminal.status("reading the conversation"))
            view = AnswerView(self, waiting)
            self._wrap = WordWrap(shutil.get_terminal_size().columns) if self._is_terminal else None
            try:
                yield view
            finally:
                waiting.close()
                self.end_line()

    def show(self, delta: Delta) -> None:
        """A piece of an answer. Reasoning is dim, on standard error."""
        if delta.reasoning:
            self._is_thinking = True
            self.terminal.console.print(
                delta.reasoning.translate(_CONTROL), style="dim", end="", markup=False, soft_wrap=True
            )
        if delta.text:
            if self._is_thinking:
                self._is_thinking = False
                self.terminal.console.print("\n")
            text = self._wrap.push(delta.text.translate(_CONTROL)) if self._wrap else delta.text
            self._at_start = text.endswith("\n")
            sys.stdout.write(text)
            sys.stdout.flush()

    def end_line(self) -> None:
        """Begin a new line on each stream where something stands."""
        if self._is_thinking:
            self._is_thinking = False
            self.terminal.console.print()
        if not self._at_start:
            self._at_start = True
            sys.stdout.write("\n")
            sys.stdout.flush()

    def print_line(self, text: str, style: str | None = None) -> None:
        """Lines on standard error."""
        self.terminal.console.print(text, style=style, markup=False, soft_wrap=True)


class AnswerView:
    """The answer that is coming."""

    def __init__(self, screen: Screen, waiting: ExitStack) -> None:
        self._screen, self._waiting = screen, waiting

    def show(self, delta: Delta) -> None:
        """The first one ends the spinner."""
        self._waiting.close()
        self._screen.show(delta)


def figures_text(figures: Figures) -> str:
    """`24 tokens, 12.3 tokens/s, the first after 0.21 s; prompt 54 tokens, 40 cached`."""
    rate = f", {figures.tokens_per_s:.1f} tokens/s" if figures.tokens_per_s is not None else ""
    first = f", the first after {figures.first_token_s:.2f} s" if figures.first_token_s is not None else ""
    cached = f", {figures.cached_tokens:,} cached" if figures.cached_tokens is not None else ""
    prompt = f"; prompt {figures.prompt_tokens:,} tokens{cached}" if figures.prompt_tokens is not None else ""
    count = "answer of unknown length" if figures.new_tokens is None else f"{figures.new_tokens:,} tokens"
    return count + rate + first + prompt
