"""Text that comes in pieces is broken where `textwrap` breaks the whole of it."""

from __future__ import annotations

import re
import textwrap

from hypothesis import given, settings
from hypothesis import strategies as some

from odmoe.conversation.word_wrap import WordWrap

WIDTH = 24
_ERASED = re.compile(r"\x1b\[(\d+)D\x1b\[K")


def on_screen(written: str) -> list[str]:
    """Lines as a terminal shows what is written; it has no other sequences than the erasing of a word."""
    while found := _ERASED.search(written):
        written = written[: found.start() - int(found[1])] + written[found.end() :]
    return written.split("\n")


@settings(max_examples=40)
@given(some.lists(some.text("abcde", min_size=1, max_size=WIDTH - 2), min_size=1, max_size=30), some.data())
def test_lines_break_between_words(words: list[str], data: some.DataObject) -> None:
    text = " ".join(words)
    cuts = sorted(data.draw(some.lists(some.integers(0, len(text)), max_size=20)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    wrap = WordWrap(WIDTH)
    shown = [line.rstrip() for line in on_screen("".join(map(wrap.push, pieces)))]
    assert [line for line in shown if line] == textwrap.wrap(text, WIDTH - 1)
    assert max(map(len, shown)) < WIDTH


def test_a_word_longer_than_a_line_stays_whole_for_a_terminal_to_break() -> None:
    wrap = WordWrap(WIDTH)
    assert wrap.push("x" * 50) == "x" * 50
    assert wrap.push("\n    code here\n") == "\n    code here\n"
