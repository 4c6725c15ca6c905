"""Other people's text, as it may be shown: on one line, and without what steers a terminal or hides what it says."""

from __future__ import annotations

import re

MOST = 4096
"""Characters that are shown of a text."""

_BREAK = re.compile(r"[ \t]*\r?\n\s*")


def one_line(text: str, most: int = MOST) -> str:
    """At most some `most` characters of it, those of its begin and end, escaped, with a space for each line break.

    What is not printable is written as in a string of Python: escape sequences, other controls, directions of writing,
    blanks of other widths, halves of surrogate pairs.
    """
    if len(text) > most:
        end = most // 4
        text = f"{text[: most - end]}... ({len(text)} characters) ...{text[-end:]}"
    return text if text.isprintable() else escape(_BREAK.sub(" ", text))


def escape(text: str) -> str:
    """The whole text, on one line."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
